// The form of gains.md. Rates are those of bench/results/two-cores.json (trajectories of 18,432
// bytes a second, one worker to one trainer) and weights-cpu.json, weights-h200.json (GB/s).
"use strict";
const BYTES = 2048 * 9;
const TRAJECTORIES = {
  "shmbus, packed": 184442,
  "pyzmq, msgspec": 63527,
  "multiprocessing.Queue": 33848,
  "Ray, put and get": 3906,
  "TransferQueue": 3435,
  "Atropos, REST": 182,
};
const WEIGHTS = {
  "shmbus, device memory": [1742, 1928],
  "shmbus, host memory, from and to a GPU": [54.2, 54.7],
  "shmbus, host memory, CPU": [12.1, 11.8],
};
const FIELDS = [
  ["samples", "samples a step", 512],
  ["tokens", "tokens a sample", 4096],
  ["payload", "bytes a token: 9 for ids, logprobs and mask; 1,545 with 96 x 8 routed experts as int16", 9],
  ["step", "seconds a step", 60],
  ["model", "GB of weights", 8],
  ["link", "GB/s between machines; 0 for one machine", 0],
];

/** What a step moves, and what each way of moving it takes: pure, so that a test can call it. */
function plan({ samples, tokens, payload, step, model, link }) {
  const bytes = samples * tokens * payload;
  const overLink = (size) => (link > 0 ? size / (link * 1e9) : 0);
  const share = (seconds) => [seconds, seconds / step];
  const ways = Object.entries(TRAJECTORIES).map(([name, rate]) =>
    [name, ...share(Math.max(bytes / (rate * BYTES), overLink(bytes)))]);
  const weights = Object.entries(WEIGHTS).map(([name, [out, into]]) =>
    [name, ...share(overLink(model * 1e9) + model / out + model / into)]);
  const [shmbus, , queue] = ways;
  const gain = queue[2] - shmbus[2];
  const verdict = gain < 0.01
    ? "Moving samples faster gains less than 1 % of a step here. Come for complete groups, resume and status, or not at all."
    : `A trainer that waits for its samples in a multiprocessing.Queue loses ${(100 * gain).toFixed(0)} % of a step more.`;
  return { bytes, ways, weights, verdict };
}

function show(place) {
  const read = () => Object.fromEntries(FIELDS.map(([key]) => [key, Number(place.querySelector(`[name=${key}]`).value)]));
  const table = (title, rows) => {
    const body = rows.map(([name, seconds, share]) =>
      `<tr><td>${name}</td><td>${seconds.toPrecision(2)} s</td><td>${(100 * share).toPrecision(2)} %</td></tr>`);
    return `<table><thead><tr><th>${title}</th><th>seconds</th><th>of a step</th></tr></thead><tbody>${body.join("")}</tbody></table>`;
  };
  const update = () => {
    const given = read();
    const wrong = FIELDS.find(([key]) => !(given[key] > 0 || (key === "link" && given[key] === 0)));
    const said = place.querySelector("output");
    if (wrong) {
      said.textContent = `${wrong[1]}: a number above 0, please.`;
      return;
    }
    const { bytes, ways, weights, verdict } = plan(given);
    said.innerHTML = `<p>${(bytes / 1e9).toPrecision(3)} GB of samples a step. ${verdict}</p>`
      + table("samples, all of a step", ways) + table("weights, published and loaded", weights);
  };
  place.innerHTML = FIELDS.map(([key, label, value]) =>
    `<p><label><input name="${key}" type="number" min="0" step="any" value="${value}"> ${label}</label></p>`).join("")
    + "<output></output>";
  place.addEventListener("input", update);
  update();
}

if (typeof document !== "undefined") {
  const place = document.getElementById("calculator");
  if (place) show(place);
}
if (typeof module !== "undefined") module.exports = { plan, TRAJECTORIES, WEIGHTS };
