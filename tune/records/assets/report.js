"use strict";
const {runs, curves} = JSON.parse(document.getElementById("curves").textContent);
// The charts in their order, by the names of their metrics (also as validation_NAME). All other metrics stand at null.
const TITLES = [
  ["Loss", /^loss(\/|$)/], ["Reward", /^reward(\/|$)/], ["Accuracy", /^(token_accuracy|rewards\/accuracies)$/],
  ["Rewards of the answers", /^rewards\//], ["Log-probs of the answers, nats", /^logps\//], [null, null],
  ["Gradient norm", /^grad_norm$/], ["Learning rate", /^lr(\/|$)/],
  ["Tokens per second and device", /^(supervised_)?tokens_per_second$/], ["Seconds of a step", /^(step|data|save|rollout)_seconds$/],
  ["Peak memory, GiB", /^peak_memory_gib$/], ["Model FLOPs utilisation", /^mfu$/],
  ["Tokens of a step", /^(supervised_)?tokens$/]
];
const EXACT = new Set(["Learning rate", "Peak memory, GiB"]);
const smoothing = document.getElementById("smoothing"), log = document.getElementById("log");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const read = value => value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));

function titled(metric) {
  const stem = metric.replace(/^validation_/, "");
  const found = TITLES.find(([, names]) => names && names.test(stem));
  return found ? found[0] : stem.split("/")[0].replaceAll("_", " ");
}

/** Exponential moving average, unbiased at the start; gaps stay. */
function smooth(values, weight) {
  let mean = 0, norm = 0;
  return values.map(value => {
    if (value == null) return value;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + 1 - weight;
    return mean / norm;
  });
}

/** The place of the last value until `at`: what a curve of a few steps shows between them. */
function before(values, at) {
  while (at > 0 && values[at] == null) at--;
  return at;
}

const isValidation = metric => metric.startsWith("validation_");
const groups = new Map();
for (const curve of curves.toSorted((one, other) => isValidation(one.metric) - isValidation(other.metric))) {
  const title = titled(curve.metric);
  groups.set(title, [...groups.get(title) ?? [], curve]);
}
const place = title => {
  const at = TITLES.findIndex(([known]) => known === title);
  return at < 0 ? TITLES.findIndex(([known]) => known === null) : at;
};
const titles = [...groups.keys()].sort((one, other) => place(one) - place(other));
const grid = document.getElementById("charts").appendChild(document.createElement("div"));
grid.className = "grid";
const cards = titles.map((title, at) => {
  const card = grid.appendChild(document.createElement("div"));
  card.className = at ? "chart" : "chart wide";
  card.appendChild(document.createElement("h3")).textContent = title;
  return card;
});
const sync = uPlot.sync("steps");
let charts = [];  // for tests too

function chart(title, card) {
  const group = groups.get(title), weight = EXACT.has(title) ? 0 : +smoothing.value;
  const metrics = [...new Set(group.map(curve => curve.metric))];
  const stems = [...new Set(metrics.map(metric => metric.replace(/^validation_/, "")))];
  const names = runs.length > 1 || stems.length === 1 ? metrics : stems;  // those that are told apart, by colour or by dashes
  const tables = [], series = [{label: "step", value: (u, step) => read(step ?? u.data[0].at(-1))}];
  for (const {run, metric, sparse, steps, values} of group) {
    const kind = Math.max(names.indexOf(metric), names.indexOf(metric.replace(/^validation_/, "")));
    const dashes = runs.length > 1 ? [[], [6, 4], [2, 3], [9, 3, 2, 3]][kind % 4] : sparse && names === stems ? [4, 3] : [];
    const stroke = colour(`--c${(runs.length > 1 ? run : kind) % 8}`), isSmooth = weight > 0 && !sparse;
    const common = {stroke, dash: dashes, spanGaps: sparse, sparse, label: runs.length > 1 ? `${runs[run]} ${metric}` : metric};
    common.points = {show: sparse && steps.length < 80 || steps.length < 3, size: 6, fill: stroke};
    if (isSmooth) {
      tables.push([steps, values]);
      series.push({...common, class: "raw", stroke: stroke + "40", width: 1});
    }
    tables.push([steps, isSmooth ? smooth(values, weight) : values]);
    series.push({...common, width: 1.8, value: (u, value, at, place) => read(place == null ? values.findLast(each => each != null) : value)});
  }
  const all = tables.flatMap(([, values]) => values).filter(value => value != null);
  const axis = {stroke: colour("--quiet"), ticks: {show: false}, font: "12px system-ui, sans-serif"};
  const lines = {stroke: colour("--line"), width: 1};
  const options = {
    width: card.clientWidth - 2 * parseFloat(getComputedStyle(card).paddingLeft), height: card.classList.contains("wide") ? 300 : 190,
    series, padding: [8, 10, 0, 0],
    scales: {x: {time: false}, y: {distr: log.checked && all.every(value => value > 0) ? 3 : 1}},
    axes: [{...axis, space: 70, size: 30, grid: {show: false}},
      {...axis, size: (_, labels) => Math.max(58, 20 + 7 * Math.max(0, ...(labels || []).map(label => label.length))), grid: lines, values: (_, ticks) => ticks.map(tick => tick == null ? "" : read(tick))}],
    cursor: {sync: {key: sync.key}, points: {size: 7}, dataIdx: (u, at, place) => at && u.series[at].sparse ? before(u.data[at], place) : place},
    legend: {markers: {width: 0, fill: (u, at) => u.series[at].stroke(u, at)}},
  };
  card.dataset.points = all.length;
  return new uPlot(options, uPlot.join(tables), card);
}

function draw() {
  document.querySelector(".tools output").value = smoothing.value;
  charts.forEach(each => each.destroy());
  charts = titles.map((title, at) => chart(title, cards[at]));
}

smoothing.value = smoothing.defaultValue = Math.max(0, ...curves.map(curve => curve.sparse ? 0 : curve.steps.length)) > 150 ? 0.8 : 0;
let waiting;
const soon = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); };
smoothing.oninput = log.onchange = soon;
document.querySelector(".tools").onreset = () => setTimeout(soon);
matchMedia("(prefers-color-scheme: dark)").onchange = soon;
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; soon(); } });
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("print");
  document.querySelectorAll("details.run").forEach(each => each.open = true);
  draw();
});
addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); draw(); });
draw();
