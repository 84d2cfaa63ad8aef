// Curves of the last minutes, drawn by uPlot (a global of its own script).
//
// Invariants: a chart is made once and given new data; what it draws is said in words too; a jump of
// the policy version is a mark.
import { html, Component } from "/vendor/htm-preact.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASH = { in: [], out: [6, 3], late: [3, 3] };

export function mark(name) { performance.mark(`shmbus-${name}`); }

// Ticks at times that people say, all in seconds or all in minutes.
const TICKS = [10, 20, 60, 120, 300];
export function said(ticks) {
  const seconds = ticks.some((s) => s % 60);
  return ticks.map((s) => (s === 0 ? "now" : seconds ? `${s} s` : `${s / 60} min`));
}

// Marks on an axis: at the most, and where versions come evenly.
const MARKS = 10, EVEN = 7;
const step = (range) => { for (let size = 1; ; size *= 10) for (const n of [1, 2, 5]) if (range / (n * size) <= EVEN) return n * size; };
// The versions to be marked, as times and numbers: round ones, so that a mark stays with its version
// as time goes on, and never two within a tenth of the axis.
export function marks(points, version) {
  if (points.length < 2) return [];
  const found = points.map((point) => point[version]), every = step(Math.max(...found) - Math.min(...found));
  const now = points[points.length - 1][0], gap = Math.max(60, now - points[0][0]) / MARKS, chosen = [];
  for (let i = 1; i < points.length; i++) {
    const round = Math.floor(found[i] / every), t = points[i][0] - now;
    if (round === Math.floor(found[i - 1] / every) || (chosen.length && t - chosen[chosen.length - 1].t < gap)) continue;
    chosen.push({ t, v: found[i] < found[i - 1] ? found[i] : round * every });
  }
  return chosen;
}

export class Chart extends Component {
  data({ points, lines }) {
    const now = points.length ? points[points.length - 1][0] : 0;
    const found = [[], ...lines.map(() => [])];
    let before = null;
    for (const point of points) {
      const at = point[0] - now;
      // Where nobody looked for a while there is a gap.
      if (before !== null && at - before > 5) { found[0].push(before + 1); lines.forEach((_, i) => found[i + 1].push(null)); }
      found[0].push(at);
      lines.forEach((line, i) => found[i + 1].push(point[line.at] ?? null));
      before = at;
    }
    return found;
  }
  versions(plot) {
    const { points, version } = this.props, { ctx, bbox } = plot;
    ctx.save(); ctx.textAlign = "left"; ctx.textBaseline = "alphabetic"; ctx.lineWidth = 1; ctx.fillStyle = ctx.strokeStyle = colour("--dim");
    ctx.font = `${10 * devicePixelRatio}px system-ui`; ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { t, v } of marks(points, version)) {
      const x = Math.round(plot.valToPos(t, "x", true)), text = `v${v}`;
      if (x < bbox.left) continue;
      ctx.beginPath(); ctx.moveTo(x + .5, bbox.top); ctx.lineTo(x + .5, bbox.top + bbox.height); ctx.stroke();
      if (x + ctx.measureText(text).width + 4 < bbox.left + bbox.width) ctx.fillText(text, x + 3 * devicePixelRatio, bbox.top + 9 * devicePixelRatio);
    }
    ctx.restore();
  }
  size() { return { width: Math.max(120, this.box.clientWidth), height: Math.max(130, this.box.clientHeight) }; }
  make() {
    if (this.plot) this.plot.destroy();
    const { lines, form } = this.props;
    const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    this.plot = new uPlot({
      ...this.size(), legend: { show: false }, cursor: { show: false }, padding: [6, 14, 0, 0],
      scales: { x: { time: false, range: (_, low) => [Math.min(-60, low ?? -60), 0] }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.1 : low < 0 ? 0 : 1] } },
      axes: [{ ...axis, size: 22, incrs: TICKS, values: (_, ticks) => said(ticks) }, { ...axis, size: 52, space: 26, values: (_, ticks) => ticks.map((v) => form(v)) }],
      series: [{}, ...lines.map((line) => ({ label: line.label, stroke: () => colour(`--${line.kind}`), width: 1.6, dash: DASH[line.kind], points: { show: false } }))],
      hooks: { draw: [(plot) => this.versions(plot)] },
    }, this.data(this.props), this.box);
  }
  componentDidMount() {
    this.make();
    this.sizes = new ResizeObserver(() => this.plot.setSize(this.size()));
    this.sizes.observe(this.box);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.plot.redraw();
    this.dark.addEventListener("change", this.redraw);
  }
  componentDidUpdate() { this.plot.setData(this.data(this.props)); }
  componentWillUnmount() { this.sizes.disconnect(); this.dark.removeEventListener("change", this.redraw); this.plot.destroy(); }
  render({ title, lines, form, note }) {
    const words = lines.map((line) => `${line.label} ${form(line.now ?? undefined)}`).join(", ");
    return html`<section class="card" aria-label=${title}><div class="head"><h2>${title}</h2><div class="legend">${lines.map((line) => html`<span><i class=${`key ${line.kind}`}></i>${line.label} <b>${form(line.now ?? undefined)}</b></span>`)}${note ? html`<span>${note}</span>` : ""}</div></div>
      <div class="chart" role="img" aria-label=${`${title}, the last minutes; now ${words}`} ref=${(box) => { if (box) this.box = box; }}></div></section>`;
  }
}
