// What happened: to the bus as a whole, and to the one group that is open.
//
// Invariants: whatever a producer wrote is text; what the wall shows of a group is newer than what was
// asked for, and is shown where both have it.
import { html } from "/vendor/htm-preact.js";
import { CELLS, count, several, time } from "/words.js";

const STATES = { there: "t", failed: "f", asked: "a", begun: "b" };
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const at = (unix) => clock.format(new Date(unix * 1000));

const BUS = {
  daemon_began: () => "the daemon began", resumed: () => "producers were resumed",
  producer_came: (e) => `${e.who} came`, producer_left: (e) => `${e.who} left`,
  producer_died: (e) => `${e.who} died`, producer_gone: (e) => `${e.who} left or died`,
  trainer_came: (e) => `${e.who} came to take groups`, trainer_left: (e) => `${e.who} left`,
  trainer_lost: (e) => `${e.who} lost its connection`,
  requests_paused: (e) => `requests are given out one at a time: ${e.text}`, requests_resumed: () => "requests are given out again",
  paused: (e) => `producers were paused: ${e.text || "no reason given"}`, policy_version: (e) => `policy version${e.text.includes(" ") ? "s" : ""} ${e.text}`,
};
const GROUP = {
  leased: (e) => `leased to ${e.who}`, given_back: () => "given back, to be delivered again",
  acknowledged: (e) => `acknowledged by ${e.who}`,
  dropped: (e) => `${e.index === undefined || e.index === null ? "dropped" : `sample ${e.index} dropped`}${e.who ? ` by ${e.who}` : ""}: ${e.text.replace("_", " ")}`,
  failed: (e) => `sample ${e.index} failed for good${e.who ? ` at ${e.who}` : ""}: ${e.text || "no reason given"}`,
  asked: (e) => `sample ${e.index} failed${e.who ? ` at ${e.who}` : ""} (${several(e.count || 1, "attempt")}), and is asked for again: ${e.text || "no reason given"}`,
};
const told = (words, event) => (words[event.kind] ? words[event.kind](event) : event.kind);
const BAD = new Set(["producer_died", "trainer_lost", "failed"]);

export function Events({ events, daemon, now }) {
  if (!daemon || !daemon.answers) return "";
  return html`<section class="card fills" aria-label="what happened"><h2>What happened <small>newest first, of groups not</small></h2>
    ${events.length === 0 ? html`<p class="dim">Nothing that is remembered.</p>` : html`<ul class="events">${[...events].reverse().map((event) =>
    html`<li><span class="dim">${at(event.t)}</span> <span class=${BAD.has(event.kind) ? "no" : ""}>${told(BUS, event)}</span></li>`)}</ul>`}</section>`;
}

// A group that is not on the wall any more, in the wall's form.
function rowOf({ group, now }) {
  const cells = {};
  for (const c of group.cells) cells[c.index] = { s: STATES[c.state ?? "there"], v: c.score ?? undefined, p: c.producer ?? undefined, t: c.age_s === null || c.age_s === undefined ? undefined : now - c.age_s, n: c.attempts, r: c.reason, b: c.taken_by ?? undefined };
  return { id: group.instance_id, size: group.size, present: group.present, since: now - group.age_s, cells, omitted: group.cells_omitted };
}

function where(answer, row) {
  if (row) return "";
  if (!answer) return "…";
  if (answer.state === "leased") return `complete, and leased to ${answer.holder} for ${time(answer.held_s)}`;
  if (answer.state === "ready") return "complete, and waits for a trainer";
  if (answer.state === "open") return "incomplete";
  return answer.events.length ? "no longer on the bus" : "not on the bus, and nothing of it is remembered";
}

export function History({ group, row, told: answer, names, now }) {
  const shown = row || (answer && answer.group ? rowOf(answer) : null);
  const round = group.round === undefined ? "" : ` round ${group.round}`;
  const state = where(answer, row);
  return html`<div class="history" id="history" role="region" aria-label=${`history of ${group.id}`}>
    <p><b>${group.id}</b>${round}${group.split ? ` for ${group.split}` : ""}: ${state}${shown ? html`${state ? "; " : ""}${count(shown.present)} of ${shown.size ? count(shown.size) : "?"} there${shown.need ? `, ${shown.need} complete it` : ""}, the first ${time(now - shown.since)} ago` : ""}${
      shown && shown.waits_for !== undefined ? html`; it waits for <b>${names(shown.waits_for)}</b> alone` : ""}</p>
    ${shown ? samples(shown, names, now) : ""}
    ${answer && answer.events.length ? html`<ol class="events" aria-label="what happened to it">${answer.events.map((event) => html`<li><span class="dim">${at(event.unix_s)}</span> ${told(GROUP, event)}</li>`)}</ol>` : ""}
    ${answer && answer.problem ? html`<p class="dim">${answer.problem}</p>` : ""}</div>`;
}

function more(cell, names) {
  if (!cell.n) return "";
  const again = cell.s !== "a" ? "" : cell.b === undefined ? "; nobody has taken it yet" : `; ${names(cell.b)} makes it again`;
  return `${several(cell.n, "failed attempt")}: ${cell.r || "no reason given"}${again}`;
}

function samples(row, names, now) {
  const cells = Object.entries(row.cells).map(([index, cell]) => ({ index: Number(index), ...cell }));
  const missing = [];
  for (let i = 0; i < Math.min(row.size, 128); i++) if (!row.cells[i]) missing.push(i);
  cells.sort((a, b) => (a.t ?? Infinity) - (b.t ?? Infinity) || a.index - b.index);
  return html`<table><thead><tr><th>sample</th><th>what</th><th class="n">reward</th><th>who</th><th class="n">when</th><th>more</th></tr></thead><tbody>
    ${cells.map((cell) => html`<tr key=${cell.index}><td class="n">${cell.index}</td><td>${CELLS[cell.s]}</td><td class="n">${cell.s === "t" ? (cell.v === undefined ? "not finite" : +cell.v.toPrecision(4)) : ""}</td>
      <td class="who">${cell.p === undefined ? "" : names(cell.p)}</td><td class="n">${cell.t === undefined ? "" : `${time(now - cell.t)} ago`}</td><td class="who">${more(cell, names)}</td></tr>`)}
    ${missing.length ? html`<tr><td class="n">${missing.slice(0, 24).join(", ")}${missing.length > 24 ? ` and ${missing.length - 24} more` : ""}</td><td colspan="5">missing</td></tr>` : ""}
    </tbody></table>${row.omitted ? html`<p class="dim">and ${count(row.omitted)} samples that are not shown</p>` : ""}`;
}
