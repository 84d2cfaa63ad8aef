// The page: a picture of one bus, or of all, kept by the server's events. It changes nothing.
//
// Invariants: whatever a producer wrote is text (textContent, by the renderer), never markup; what a
// patch did not change is the same object, so that only what changed is drawn again; a point without
// a value is a gap and no line.
import { html, render, Component } from "/vendor/htm-preact.js";
import { Chart, mark } from "/charts.js";
import { Events, History } from "/history.js";
import { CELLS, SIGNS, bound, count, each, number, several, short, size, time } from "/words.js";

const LEVELS = { good: "✓", note: "·", warning: "▲", trouble: "■" };
const STATES = {
  live: "live", paused: "paused", unread: "nobody reads", unused: "not in use", stuck: "daemon silent",
  removed: "removed", absent: "not there", unreadable: "cannot be read",
};

// Without a prototype: a bus or a group may be called __proto__.
function merge(old, change) {
  const found = Object.assign(Object.create(null), old);
  for (const [key, value] of Object.entries(change)) {
    if (value === null) delete found[key];
    else if (value && typeof value === "object" && !Array.isArray(value) && found[key] && typeof found[key] === "object") found[key] = merge(found[key], value);
    else found[key] = value;
  }
  return found;
}

// The bus that the address names; an address that was cut off, or typed, is taken as it is.
function busOf(hash) {
  try { return decodeURIComponent(hash.slice(1)); } catch { return hash.slice(1); }
}

class Same extends Component {
  shouldComponentUpdate(next) { for (const key in next) if (next[key] !== this.props[key]) return true; return false; }
}

// -- groups filling up --------------------------------------------------------------------------

class Cells extends Same {
  render({ row, low, high }) {
    const cells = [];
    const last = Math.min(row.size || row.present + 1, 128);
    for (let index = 0; index < last; index++) {
      const cell = row.cells[index];
      const state = cell ? cell.s : "m";
      // By halves: the largest numbers are further apart than any number.
      const part = cell && cell.v !== undefined ? (high > low ? (cell.v / 2 - low / 2) / (high / 2 - low / 2) : 1) : 0;
      cells.push(html`<i class=${`cell ${state}`} key=${index} style=${state === "t" ? { "--v": `${Math.round(part * 100)}%` } : {}}>${SIGNS[state] || ""}</i>`);
    }
    const more = (row.size || 0) - last;
    return html`<span class=${`cells ${last > 20 ? "many" : ""}`} aria-hidden="true">${cells}${more > 0 ? html`<span class="dim"> and ${count(more)} more</span>` : ""}</span>`;
  }
}

function prefix(ids) {
  // What all ids share is said once, so that the part that differs can be read.
  if (ids.length < 3) return "";
  let shared = ids[0];
  for (const id of ids) while (!id.startsWith(shared)) shared = shared.slice(0, -1);
  // Half of a pair of surrogates is no letter.
  shared = shared.replace(/[\ud800-\udbff]$/, "").replace(/[0-9]+$/, "");
  return shared.length > 3 ? shared : "";
}

function Wall({ wall, names, now, open, told, onOpen, given }) {
  const rows = wall.order.map((key) => [key, wall.rows[key]]).filter(([, row]) => row);
  let low = Infinity, high = -Infinity, widest = 0;
  for (const [, row] of rows) {
    widest = Math.max(widest, row.size);
    for (const cell of Object.values(row.cells)) if (cell.v !== undefined) { low = Math.min(low, cell.v); high = Math.max(high, cell.v); }
  }
  const shared = prefix(rows.map(([, row]) => row.id));
  const longest = Math.max(0, ...rows.map(([, row]) => (row.id.length - shared.length || row.id.length) + (row.round === undefined ? 0 : 2 + `${row.round}`.length) + (row.split ? 1 + row.split.length : 0)));
  const age = rows.length ? now - rows[0][1].since : 0;
  const gone = open !== null && !wall.rows[open.key];
  return html`<section class="card" aria-label="groups filling up">
    <div class="head"><h2>Groups filling up <small>${shared ? `${shared}…, ` : ""}oldest first${wall.omitted ? `, ${count(wall.omitted)} more` : ""}</small></h2>
    <div class="legend" aria-hidden="true">${low < high ? html`<span>reward ${low.toPrecision(2) * 1}<i class="ramp"></i>${high.toPrecision(2) * 1}</span>` : html`<span><i class="cell t" style=${{ "--v": "100%" }}></i>there</span>`}
      <span><i class="cell m"></i>missing</span><span><i class="cell b">•</i>begun</span><span><i class="cell a">↻</i>asked again</span><span><i class="cell f">×</i>failed</span></div></div>
    ${now - wall.read > 3 ? html`<p class="dim">As it was ${time(now - wall.read)} ago: without a daemon, many records are walked only now and then.</p>` : ""}
    ${wall.problem ? html`<p class="dim">${wall.problem}</p>` : ""}
    ${rows.length === 0 && !wall.problem ? html`<p class="dim">No group is incomplete.</p>` : ""}
    ${gone ? html`<${History} group=${open} told=${told} names=${names} now=${now}/>` : ""}
    <div class=${`wall ${widest > 16 ? "wide" : ""}`} style=${{ "--id": `${Math.min(14, Math.max(3, longest))}ch`, "--row": `calc(${Math.max(4, widest)} * (var(--cell) + 2px))` }}>${rows.map(([key, row]) => {
      const makers = [...new Set(Object.values(row.cells).filter((c) => c.s === "b").map((c) => names(c.p)))];
      const why = (Object.values(row.cells).find((c) => c.r) || {}).r || "";
      const who = row.waits_for !== undefined ? names(row.waits_for) : why || makers.join(", ");
      const old = now - row.since > Math.max(10, age / 2);
      const failed = Object.values(row.cells).filter((c) => c.s === "f" || c.s === "a").length;
      const begun = Object.values(row.cells).filter((c) => c.s === "b").length;
      const shown = open !== null && open.key === key;
      const name = { key, id: row.id, round: row.round, split: row.split };
      return html`<button key=${key} type="button" aria-expanded=${shown ? "true" : "false"} onClick=${() => onOpen(shown ? null : name)}>
        <span class="id cut" title=${row.id} aria-hidden="true">${row.id.slice(shared.length) || row.id}${row.round === undefined ? "" : ` ·${row.round}`}${row.split ? ` ${row.split}` : ""}</span>
        <${Cells} row=${row} low=${low} high=${high}/>
        <span class=${`age ${old ? "old" : ""}`} aria-hidden="true">${short(now - row.since)}</span>
        <span class="cut dim" title=${who} aria-hidden="true">${who}</span>
        <span class="sr">${row.id}: ${row.present} of ${row.size || "unknown"} there${begun ? `, ${begun} begun` : ""}${failed ? `, ${failed} failed` : ""}${who ? `, waits for ${who}` : ""}</span>
      </button>${shown ? html`<${History} group=${name} row=${row} told=${told} names=${names} now=${now}/>` : ""}`;
    })}</div>
    <p class="find"><label>History of a group <input id="find" type="text" maxlength="1020" placeholder="its id, then Enter" autocomplete="off" spellcheck="false" onKeyDown=${(event) => {
      if (event.key === "Enter" && event.target.value) onOpen({ key: `?${event.target.value}`, id: event.target.value });
    }}/></label></p>
    ${given ? html`<p class="dim">${several(given, "group")} given up for a failed sample so far</p>` : ""}
  </section>`;
}

// -- the other cards ----------------------------------------------------------------------------

function Flow({ picture }) {
  const { ledger, rates, groups, producers } = picture;
  const dropped = Object.entries(ledger.dropped || {});
  const lost = dropped.reduce((sum, [, n]) => sum + n, 0);
  const alive = (producers.states.alive || 0) + (producers.states.idle || 0);
  const bad = Object.entries(producers.states).filter(([state]) => state !== "alive" && state !== "closed");
  const stage = (name, value, rate, note, end) => html`<li class=${`${rate > 0 ? "moves" : ""} ${end ? "end" : ""}`}><span class="dim">${name}</span><b data-stage=${name}>${count(value)}</b>
    <span class="dim">${rate === undefined || (!rate && !value) ? "" : html`<span class="rate">${each(rate)}/s</span> `}${note}</span></li>`;
  const terms = [["acknowledged", ledger.acknowledged], ["leased", ledger.leased], ["stashed", ledger.stashed], ["in the ring", ledger.in_ring],
    ...dropped.map(([reason, n]) => [`dropped (${reason.replace("_", " ")})`, n])];
  if (ledger.unreadable) terms.push(["unreadable", ledger.unreadable]);
  return html`<section class="card" aria-label="flow of trajectories"><ol class="flow">
    ${stage("producers", alive, rates.committed, bad.map(([state, n]) => `${n} ${state}`).join(", "))}
    ${stage("in the ring", ledger.in_ring, undefined, "not read yet")}
    ${stage("open groups", groups.open, undefined, `${count(ledger.stashed)} samples wait`)}
    ${stage("complete", groups.ready, undefined, "wait to be taken")}
    ${stage("leased", groups.leased, undefined, `${count(ledger.leased)} samples held`)}
    ${stage("acknowledged", ledger.acknowledged, rates.acknowledged, "trained on", true)}
    ${stage("dropped", lost, rates.dropped, dropped.map(([reason, n]) => `${reason.replace("_", " ")} ${count(n)}`).join(", "), true)}
  </ol><p class="ledger"><span class=${ledger.balanced ? "yes" : "no"}>${ledger.balanced ? "✓ balances" : "✗ does not balance"}</span>${" "}
    <span data-ledger>${count(ledger.committed)} committed = ${terms.map(([name, n]) => `${count(n)} ${name}`).join(" + ")}</span>${ledger.exact ? "" : html`<span class="dim"> (by the counters)</span>`}</p></section>`;
}

const RANK = { dead: 0, stopped: 1, gone: 2, idle: 3, alive: 4, closed: 5 };

function Producers({ producers, now }) {
  const rows = Object.entries(producers.rows);
  rows.sort(([a, x], [b, y]) => y.waits - x.waits || RANK[x.state] - RANK[y.state] || a - b);
  const most = Math.max(1, ...rows.map(([, row]) => row.waits));
  const shown = rows.slice(0, 40);
  const hidden = rows.length - shown.length + producers.omitted;
  return html`<section class="card" aria-label="producers"><h2>Producers <small>${count(rows.length + producers.omitted)} of ${count(producers.max)} places</small></h2>
    ${rows.length === 0 ? html`<p class="dim">None has ever attached.</p>` : html`<div class="scroll"><table class="facts"><thead><tr><th>who</th><th>state</th><th class="n">a second</th><th class="n">committed</th><th class="n">idle</th><th class="n">waited<small> last minute</small></th><th class="n">holds</th><th class="n folds">groups wait for it alone</th></tr></thead><tbody>
    ${shown.map(([id, row]) => html`<tr key=${id}><td class="who">${row.name} <span class="dim pid">pid ${row.pid}</span></td><td><span class=${`chip ${row.state}`}>${row.state}</span>${row.unmade ? html` <span class="dim">${row.unmade}</span>` : ""}</td>
      <td class="n" data-is="a second">${each(row.rate)}</td><td class="n" data-is="committed">${count(row.committed)}</td><td class="n" data-is="idle">${row.since === undefined || row.state === "closed" ? "–" : time(now - row.since)}</td><td class=${`n ${row.waited ? "" : "nil"}`} data-is="waited">${row.waited ? time(row.waited) : "–"}</td><td class="n" data-is="holds">${size(row.held)}</td>
      <td class=${`n ${row.waits ? "" : "nil"}`} data-is="groups wait for it alone">${row.waits ? html`<i class="blame" style=${{ "--w": `${Math.round(64 * row.waits / most)}px` }}></i>${count(row.waits)}` : "–"}</td></tr>`)}
    </tbody></table></div>`}${hidden > 0 ? html`<p class="dim">and ${count(hidden)} more</p>` : ""}</section>`;
}

function Agents({ agents, now }) {
  const rows = Object.entries(agents.rows), hidden = agents.sessions - rows.length;
  rows.sort(([a, x], [b, y]) => x.since - y.since || a.localeCompare(b));
  const down = Object.entries(agents.engines).filter(([, state]) => state !== "up");
  return html`<section class="card" aria-label="agents"><h2>Agents <small>${count(agents.sessions)} sessions, ${count(agents.calls)} calls in flight, ${count(Object.keys(agents.engines).length)} engines</small></h2>
    ${down.map(([url, state]) => html`<p key=${url} class="dim">${url} is ${state}</p>`)}
    ${rows.length === 0 ? html`<p class="dim">No session is open.</p>` : html`<div class="scroll"><table class="facts"><thead><tr><th>sample</th><th class="n">since</th><th class="n">turns</th><th class="n">tokens</th><th class="n">calls</th><th class="n folds">engine</th></tr></thead><tbody>
    ${rows.map(([id, row]) => html`<tr key=${id}><td class="who">${id}</td><td class="n" data-is="since">${time(now - row.since)}</td><td class="n" data-is="turns">${count(row.turns)}</td><td class="n" data-is="tokens">${count(row.tokens)}</td><td class=${`n ${row.calls ? "" : "nil"}`} data-is="calls">${row.calls ? count(row.calls) : "–"}</td><td class="n" data-is="engine">${row.engine}</td></tr>`)}
    </tbody></table></div>`}${hidden > 0 ? html`<p class="dim">and ${count(hidden)} more</p>` : ""}${agents.drift ? html`<p class="dim">${count(agents.drift)} calls went on in words and not in tokens, each of which began a row.</p>` : ""}</section>`;
}

const OF_WEIGHTS = { unknown: 0, behind: 1, loading: 2, assumed: 3, serving: 4 };

function Engines({ engines, now }) {
  const rows = Object.entries(engines.rows);
  rows.sort(([a, x], [b, y]) => OF_WEIGHTS[x.state] - OF_WEIGHTS[y.state] || a.localeCompare(b));
  return html`<section class="card" aria-label="engines"><h2>Engines <small>${several(rows.length + engines.omitted, "inference server")}</small></h2>
    <div class="scroll"><table class="facts"><thead><tr><th>server</th><th>weights</th><th class="n">version</th><th class="n">published</th><th>answers</th><th class="n">calls</th></tr></thead><tbody>
    ${rows.map(([at, row]) => html`<tr key=${at}><td class="who">${at}${row.why ? html` <span class="dim">${row.why}</span>` : ""}</td><td><span class=${`chip ${row.state}`}>${row.state}</span></td><td class="n" data-is="version">${count(row.version)}</td><td class="n" data-is="published">${row.published === undefined ? "–" : `${time(now - row.published)} ago`}</td><td data-is="answers">${row.answers || "–"}</td><td class=${`n ${row.calls ? "" : "nil"}`} data-is="calls">${count(row.calls)}</td></tr>`)}
    </tbody></table></div>${engines.omitted > 0 ? html`<p class="dim">and ${count(engines.omitted)} more</p>` : ""}</section>`;
}

function Holders({ holders, collector, daemon, waited, now }) {
  const shown = holders.slice(0, 40), ranks = shown.some((row) => row.rank !== undefined);
  return html`<section class="card" aria-label="holders"><h2>Held by <small>${daemon && daemon.answers ? `a daemon, pid ${daemon.pid}, leases to` : ""}</small></h2>
    ${shown.length === 0 ? html`<p class="dim">${collector.alive ? "No trainer is attached." : collector.name ? `Nobody; the last was ${collector.name}${collector.pid ? ` (pid ${collector.pid})` : ", which closed"}.` : "Nobody has ever read this bus."}</p>`
    : html`<div class="scroll"><table class="facts"><thead><tr><th>trainer</th><th>now</th>${ranks ? html`<th>rank</th><th class="n">step</th>` : ""}<th class="n">groups</th><th class="n">samples</th><th class="n">since</th><th class="n">waited in all</th></tr></thead><tbody>
    ${shown.map((row) => html`<tr><td class="who">${row.name} <span class="dim pid">pid ${row.pid}${row.split ? `, for ${row.split}` : ""}</span></td><td><span class=${`chip ${row.now.split(" ")[0]}`}>${row.now}</span></td>${ranks ? html`<td data-is="rank">${row.rank || "–"}</td><td class="n" data-is="step">${row.step ?? "–"}</td>` : ""}<td class="n" data-is="groups">${count(row.groups)}</td><td class="n" data-is="samples">${count(row.trajectories)}</td>
      <td class=${`n ${row.since === undefined ? "nil" : ""}`} data-is="since">${row.since === undefined ? "–" : time(now - row.since)}</td><td class="n" data-is="waited">${row.waited_s === undefined ? "–" : time(row.waited_s)}</td></tr>`)}
    </tbody></table></div>`}${holders.length > shown.length ? html`<p class="dim">and ${holders.length - shown.length} more</p>` : ""}
    <p class="dim">Waited in the last minute, all together: producers ${time(waited.producers)}, trainers with nothing in hand ${time(waited.trainers)}.</p></section>`;
}

const NAMES = { score: ["Reward", "of a sample"], solved: ["Solved", "part of a group"], lag: ["Policy lag", "versions"], length: ["Length", "tokens"], age: ["Age at delivery", "seconds"] };
const percent = (n) => `${Math.round(100 * n)}%`;

class Distribution extends Same {
  render({ name, found }) {
    const [title, unit] = NAMES[name] || [name, ""];
    const total = found.buckets.reduce((a, b) => a + b, 0);
    const form = name === "solved" ? percent : bound;
    let first = found.buckets.findIndex((n) => n), last = found.buckets.length - 1;
    while (last > first && !found.buckets[last]) last--;
    first = Math.max(0, first - 1); last = Math.min(found.buckets.length - 1, last + 1);
    const most = Math.max(1, ...found.buckets), many = last - first > 7;
    const label = (i) => (i < found.bounds.length ? `≤ ${form(found.bounds[i])}` : `> ${form(found.bounds[i - 1])}`);
    return html`<section class="card" aria-label=${title}><h2>${title} <small>${unit}${total && found.sum !== undefined ? `, mean ${name === "solved" ? percent(found.sum / total) : +(found.sum / total).toPrecision(3)}` : ""}</small></h2>
      ${total === 0 ? html`<p class="dim">Nothing was delivered yet.</p>` : html`<div class="bars" role="img" aria-label=${found.buckets.map((n, i) => (n ? `${label(i)}: ${n}` : "")).filter(Boolean).join(", ")}>
      ${found.buckets.slice(first, last + 1).map((n, i) => html`<div title=${`${label(first + i)}: ${count(n)}`}>${n && !many ? each(100 * n / total) + "%" : ""}<i style=${{ "--h": `${Math.round(62 * n / most)}px` }}></i>${many && i % 2 ? "\u00a0" : html`${form(found.bounds[Math.min(first + i, found.bounds.length - 1)])}${first + i >= found.bounds.length ? "+" : ""}`}</div>`)}</div>`}</section>`;
  }
}

// An option is one word: no line ends at its hyphens.
const whole = (text) => text.split(/(--[a-z-]+)/).map((part, i) => (i % 2 ? html`<span class="whole">${part}</span>` : part));

function Sentence({ verdict }) {
  const rest = (verdict.findings || []).slice(1, 5);
  return html`<section class=${`card sentence ${verdict.level}`} role="status" aria-live="polite"><p><span aria-hidden="true">${LEVELS[verdict.level]} </span><span id="sentence">${whole(verdict.sentence)}</span></p>
    ${rest.length ? html`<ul>${rest.map((f) => html`<li>${f.what}${f.cause ? `: ${f.cause}` : ""}</li>`)}</ul>` : ""}</section>`;
}

function Bus({ picture, points, names: columns, open, told, onOpen, connected, held, single }) {
  const now = picture.now || Date.now() / 1000;
  const producers = (picture.producers || {}).rows || {};
  const names = (id) => (producers[id] ? producers[id].name : `producer ${id}`);
  const { daemon } = picture;
  const head = html`<header class="head">${single ? "" : html`<a href="#">all buses</a>`}<h1>${picture.name}</h1><span class=${`chip ${picture.state}`} id="state">${STATES[picture.state] || picture.state}</span>
    ${daemon && daemon.answers ? html`<span class="dim">daemon pid ${daemon.pid}, up ${time(now - daemon.since)}${daemon.recovering ? ", recovering" : ""}${daemon.draining ? ", draining" : ""}</span>` : picture.ledger && !daemon ? html`<span class="dim">no daemon</span>` : ""}
    ${picture.capacity ? html`<div class="right"><span>policy <b>v${count(picture.policy_version)}</b></span>${held ? html`<span class="chip paused">held still</span>` : ""}<span class="meter" aria-hidden="true"><i style=${{ "--part": `${Math.round(100 * picture.used / picture.capacity)}%` }}></i></span><span>${size(picture.used)} of ${size(picture.capacity)} in use</span></div>` : ""}</header>
    ${connected ? "" : html`<p class="card lost" role="alert">The connection to <code>shmbus web</code> is lost; this page tries again by itself. What you see is old.</p>`}
    <${Sentence} verdict=${picture.verdict}/>${picture.note ? html`<p class="card" role="status">${picture.note}</p>` : ""}`;
  if (!picture.ledger) return head;
  const delivered = ["score", "solved", "lag", "length", "age"].filter((name) => picture.delivered[name]).map((name) => [name, picture.delivered[name]]);
  const at = (name) => columns.indexOf(name) + 1;
  const last = points.length ? points[points.length - 1] : [];
  const chart = (title, lines, form, note) => html`<${Chart} title=${title} points=${points} form=${form} version=${at("version")} note=${note}
    lines=${lines.map(([label, column, kind]) => ({ label, at: at(column), kind, now: last[at(column)] }))}/>`;
  return html`${head}<${Flow} picture=${picture}/>
    <div class="two"><div class="stack"><${Holders} holders=${picture.holders} collector=${picture.collector} daemon=${daemon} waited=${picture.waited} now=${now}/>
      <${Wall} wall=${picture.wall} names=${names} now=${now} open=${open} told=${told} onOpen=${onOpen} given=${picture.given_up}/>
      ${picture.agents ? html`<${Agents} agents=${picture.agents} now=${now}/>` : ""}
      ${picture.engines ? html`<${Engines} engines=${picture.engines} now=${now}/>` : ""}
      <${Producers} producers=${picture.producers} now=${now}/>
      <${Events} events=${picture.events} daemon=${daemon} now=${now}/></div>
    <div class="stack curves">
      ${chart("Trajectories a second", [["committed", "committed", "in"], ["acknowledged", "acknowledged", "out"]], each)}
      ${picture.delivered && picture.delivered.score ? chart("Reward of delivered samples", [["mean", "reward", "out"]], (v) => (v === null || v === undefined ? "–" : v.toPrecision(3))) : ""}
      ${picture.delivered && picture.delivered.age ? chart("Age at delivery", [["p50", "age50", "in"], ["p99", "age99", "late"]], (v) => (v === null || v === undefined ? "–" : `${+v.toPrecision(2)} s`)) : ""}
      ${chart("Fill of the ring", [["in use", "fill", "in"]], (v) => (v === undefined ? "–" : `${Math.round(100 * v)}%`))}
      ${chart("Tokens a second", [["tokens", "tokens", "in"]], each, `${size(picture.rates.bytes || 0)}/s`)}</div></div>
    ${delivered.length ? html`<div class="three">${delivered.map(([name, found]) => html`<${Distribution} key=${name} name=${name} found=${found}/>`)}</div>` : ""}
    <footer class="foot">What you see is what <code>shmbus status ${picture.name} --json</code> <code>inspect</code> and <code>events</code> say. Read-only. <code>space</code> holds still, <code>esc</code> closes a group.</footer>`;
}

function Overview({ picture, connected }) {
  const rows = Object.entries(picture.buses);
  return html`<header class="head"><h1>Buses of this machine</h1></header>
    ${connected ? "" : html`<p class="card lost" role="alert">The connection to <code>shmbus web</code> is lost; this page tries again by itself.</p>`}
    <section class="card scroll" aria-label="buses">${rows.length === 0 ? html`<p>There is no bus. <code>shmbus serve NAME</code> or <code>shmbus.Bus.create(NAME)</code> makes one, and it is listed here.</p>` : html`<table><thead><tr><th>bus</th><th>state</th><th class="n">in use</th><th class="n">on their way</th><th class="n">trained on</th><th class="n">producers</th><th>what is to be said</th></tr></thead><tbody>
    ${rows.map(([name, row]) => html`<tr key=${name}><td class="who"><a href=${`#${encodeURIComponent(name)}`}>${name}</a></td><td><span class=${`chip ${row.state}`}>${STATES[row.state]}</span></td><td class="n">${row.capacity ? `${size(row.used)} of ${size(row.capacity)}` : "–"}</td><td class="n">${count(row.undelivered)}</td><td class="n">${count(row.acknowledged)}</td><td class="n">${count(row.producers)}</td><td class="who">${LEVELS[row.level]} ${row.sentence}</td></tr>`)}
    </tbody></table>`}${picture.omitted ? html`<p class="dim">and ${count(picture.omitted)} more</p>` : ""}</section>`;
}

// -- the stream ---------------------------------------------------------------------------------

class Page extends Component {
  constructor() {
    super();
    this.state = { picture: null, points: [], names: [], open: null, told: null, connected: true, held: false };
    addEventListener("hashchange", () => { this.open(null); this.watch(); });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.open(null);
      if (event.key === " " && event.target === document.body) { event.preventDefault(); this.setState({ held: !this.state.held }); }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.setState({ theme: Symbol() }));
    this.watch();
  }
  open(group) {
    this.setState({ open: group, told: null });
    if (group) this.ask(group);
  }
  // The history of the group that is open: asked for again with each picture, one question at a time.
  async ask(group) {
    if (this.question) return;
    this.question = true;
    const name = busOf(location.hash), query = new URLSearchParams({ id: group.id });
    if (name) query.set("bus", name);
    if (group.round !== undefined) query.set("round", group.round);
    if (group.split) query.set("split", group.split);
    try {
      const answer = await fetch(`/group?${query}`);
      const told = answer.ok ? await answer.json() : { state: "unknown", events: [], problem: await answer.text() };
      if (this.state.open === group) this.setState({ told });
    } catch (error) { /* the page says that the connection is lost */ }
    this.question = false;
    if (this.state.open && this.state.open !== group) this.ask(this.state.open);
  }
  watch() {
    clearTimeout(this.again);
    if (this.source) this.source.close();
    const name = busOf(location.hash);
    const address = `/events${name ? `?bus=${encodeURIComponent(name)}` : ""}`;
    const source = this.source = new EventSource(address);
    source.addEventListener("whole", (event) => {
      const { picture, curves } = JSON.parse(event.data);
      this.setState({ picture, points: curves ? curves.points : [], names: curves ? curves.names : [], connected: true, refused: null });
      document.title = `${picture.name || "buses"} · shmbus`;
      mark("first");
    });
    source.addEventListener("change", (event) => {
      const { change, point } = JSON.parse(event.data);
      const points = point ? [...this.state.points.slice(-299), point] : this.state.points;
      this.setState({ picture: merge(this.state.picture, change), points, connected: true });
      if (this.state.open && !this.state.held) this.ask(this.state.open);
    });
    source.onerror = () => {
      this.setState({ connected: false });
      // A stream that was refused is not tried again by the browser.
      if (source.readyState === EventSource.CLOSED) {
        this.again = setTimeout(() => this.watch(), 1500);
        this.learn(address, source);
      }
    };
  }
  // Why a stream was refused, which the browser does not say of one.
  async learn(address, source) {
    try {
      const answer = await fetch(address, { method: "GET" });
      if (answer.ok) return answer.body.cancel();
      const text = await answer.text();
      // What is drawn is another bus than the one that was asked for.
      if (this.source === source && answer.status === 404) this.setState({ picture: null, refused: text });
    } catch (error) { /* the page says that the connection is lost */ }
  }
  shouldComponentUpdate(props, next) { return !next.held || next.held !== this.state.held || next.open !== this.state.open || next.told !== this.state.told || next.refused !== this.state.refused || next.connected !== this.state.connected; }
  render(_, state) {
    if (!state.picture && state.refused) return html`<header class="head"><a href="#">all buses</a></header><p class="wait" role="status">${state.refused}</p>`;
    if (!state.picture) return html`<p class="wait" role="status">${state.connected ? "Reading the bus…" : "No answer: the server has ended, or this browser is not let in. Open the address that shmbus web printed."}</p>`;
    if (state.picture.buses) return html`<${Overview} ...${state}/>`;
    return html`<${Bus} ...${state} single=${!location.hash} onOpen=${(group) => this.open(group)}/>`;
  }
}

document.getElementById("page").textContent = "";
render(html`<${Page}/>`, document.getElementById("page"));
