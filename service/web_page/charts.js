// Charts: bandwidth and stalls over the last ten minutes (the entries of /v1/history, then the latest entry of each
// event), and the curves of training over the steps of the run (/v1/curve).

import {clock, count, most, percent, plain, plural, rate, rough, seconds, sum, UNKNOWN} from "./figures.js";
import {h, patch, table} from "./patch.js";

const WINDOW = 600; // seconds
const GAP = 10; // seconds
const POINTS = 120; // of a line over time
const ROWS = 16; // of a table over steps

/** One entry per second of a run: Unix times and values; null means unknown. */
export class Series {
  constructor() {
    this.at = [];
    this.values = {read: [], written: [], h2d: [], d2h: [], sent: [], stall: []};
  }

  /** Replaces the entries by those of /v1/history. */
  fill(history) {
    this.at = [...(history?.at || [])];
    for (const name of Object.keys(this.values))
      this.values[name] = this.at.map((_, i) => history[name]?.[i] ?? null);
  }

  /** Adds an entry unless it is already present. */
  add(entry) {
    const last = this.at.at(-1) ?? 0;
    if (!entry || entry.at <= last) return;
    const gap = last && entry.at - last > GAP; // the chart draws no line across it
    this.at.push(entry.at);
    for (const [name, values] of Object.entries(this.values)) values.push(gap ? null : entry[name]);
    const old = this.at.findIndex(time => time >= entry.at - WINDOW);
    for (const list of [this.at, ...Object.values(this.values)]) list.splice(0, old);
  }
}

/** Means over several seconds each, at most POINTS of them. The bounds of the groups do not move with time. */
function thinned({at, values}) {
  const every = Math.max(1, Math.ceil((at.at(-1) - at[0]) / POINTS));
  if (!(every > 1)) return {at, values};
  const groups = new Map();
  at.forEach((time, i) =>
    groups.set(Math.floor(time / every), [...(groups.get(Math.floor(time / every)) || []), i]),
  );
  const mean = list => indices => {
    const known = indices.map(i => list[i]).filter(value => value !== null);
    return known.length ? sum(known) / known.length : null;
  };
  const means = Object.entries(values).map(([name, list]) => [name, [...groups.values()].map(mean(list))]);
  return {at: [...groups.values()].map(indices => at[indices.at(-1)]), values: Object.fromEntries(means)};
}

const known = value => (typeof value === "number" ? value : null);

/** The curve of a rank in /v1/curve as the data of charts; NaN becomes a gap. */
export function curveOf({curve, world_size: ranks}) {
  // Of single steps, the highest value is the value.
  const highest = list => (curve.stride > 1 ? list.map(known) : []);
  return {
    at: curve.step,
    values: {
      loss: curve.loss.map(known),
      highest_loss: highest(curve.highest_loss),
      norm: curve.gradient_norm.map(known),
      highest_norm: highest(curve.highest_gradient_norm),
      seconds: curve.seconds,
      // Of a model without tokens, there is no rate.
      tokens: curve.tokens.map((tokens, i) => (tokens && curve.seconds[i] ? (ranks * tokens) / curve.seconds[i] : null)),
    },
  };
}

/** The x-axis of a chart: its ticks, its extent in words, and the groups of points that are a row of its table. */
const TIME = {
  name: "time",
  isTime: true,
  tick: clock,
  at: at => `at ${clock(at)}`,
  last: () => "now",
  thinned,
  over: at => {
    const minutes = (at.at(-1) - at[0]) / 60;
    return minutes < 1.5 ? plural(Math.round(60 * minutes), "second") : plural(Math.round(minutes), "minute");
  },
  row: at => Math.floor(at / 60),
  head: ["by minute", "minute from"],
  rowName: row => clock(60 * row),
};
const STEPS = {
  name: "the steps",
  isTime: false,
  tick: count,
  at: step => `up to step ${count(step)}`,
  last: step => `up to step ${count(step)}`,
  thinned: data => data,
  over: steps => plural(steps.at(-1), "step"),
  row: (_, i, all) => Math.floor((i * ROWS) / Math.max(ROWS, all.length)),
  head: ["over the steps", "up to step"],
  rowName: (_, indices, at) => count(at[indices.at(-1)]),
};

// A canvas does not support light-dark(), so an element of the document resolves the color.
function color(name) {
  const probe = document.createElement("i");
  probe.className = `probe ${name}`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
}

const faint = solid => solid.replace("rgb(", "rgba(").replace(")", ", 0.12)");

/** Four or five round numbers, zero among them. */
function roundTicks(_, __, low, high) {
  const least = (high || 4) / 4;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= least);
  const ticks = [];
  for (let tick = 0; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

class Chart {
  constructor(figure, {name, series, format, tick = format, range, ticks, x = TIME}) {
    Object.assign(this, {
      name,
      series,
      format,
      tick,
      range,
      ticks,
      x,
      figure,
      plot: null,
      at: [],
      data: {},
      drawn: {at: [], values: {}},
      cursor: null,
    });
    // An area is right only over an axis that begins at zero.
    this.fromZero = range(1, 2)[0] === 0;
    this.box = figure.querySelector(".plot");
    figure.querySelector("details").addEventListener("toggle", () => this.tabulate());
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
  }

  size() {
    return {width: Math.max(80, this.box.clientWidth), height: 180};
  }

  /** Draws the chart again with the current colors. */
  restart() {
    this.plot?.destroy();
    this.shown = this.visibility();
    const ink = color("ink"),
      grid = color("grid");
    const axis = {
      stroke: ink,
      grid: {stroke: grid, width: 1},
      ticks: {show: false},
      font: "12px system-ui, sans-serif",
    };
    this.plot = new uPlot(
      {
        ...this.size(),
        legend: {show: false},
        cursor: {sync: {key: this.x.name}, drag: {x: false, y: false}, y: false, points: {size: 6}},
        scales: {x: {time: this.x.isTime}, y: {range: (_, low, high) => this.range(low, high)}},
        axes: [
          {...axis, grid: {show: false}, space: this.x.isTime ? 90 : 60, size: 30, values: (_, ticks) => ticks.map(this.x.tick)},
          {...axis, size: 74, splits: this.ticks, values: (_, ticks) => ticks.map(tick => this.tick(tick))},
        ],
        series: [
          {},
          ...this.series.map(line => {
            const solid = color(line.name);
            return {
              label: line.label,
              stroke: solid,
              fill: line.dash || !this.fromZero ? undefined : faint(solid),
              width: 1.75,
              dash: line.dash,
              points: {show: false},
              show: this.has(line),
            };
          }),
        ],
        hooks: {setCursor: [plot => this.point(plot.cursor.idx)]},
      },
      [this.drawn.at, ...this.series.map(line => this.drawn.values[line.name] || [])],
      this.box,
    );
  }

  visibility() {
    return this.series.map(line => this.has(line)).join();
  }

  /** A line without values above zero is hidden if it is `optional`, or if the line named by `unless` has such values. */
  has(line) {
    const moved = name => (this.data[name] || []).some(value => value > 0);
    return moved(line.name) || !(line.optional || (line.unless && moved(line.unless)));
  }

  /** Draws `at` and `values`. `now` has the values of this moment by name, if they are known better. */
  show({at, values}, now = {}) {
    this.at = at;
    this.data = values;
    this.now = now;
    this.drawn = this.x.thinned({at, values});
    if (!this.plot || this.shown !== this.visibility()) this.restart();
    else this.plot.setData([this.drawn.at, ...this.series.map(line => this.drawn.values[line.name] || [])]);
    const summary = this.summary();
    this.box.setAttribute("aria-label", `${this.name} over ${this.x.name}. ${summary}`);
    patch(this.figure.querySelector("figcaption"), summary);
    this.readout();
    this.tabulate();
  }

  summary() {
    if (this.at.length < 2) return "Figures appear within a few seconds.";
    return (
      `Over ${this.x.over(this.at)}: ` +
      this.series
        .filter(line => this.has(line))
        .map(line => {
          const numbers = this.data[line.name].filter(value => value !== null);
          return `${line.label} ${this.format(numbers.length ? sum(numbers) / numbers.length : null)} on average, ${this.format(most(numbers))} at most`;
        })
        .join("; ") +
      "."
    );
  }

  point(index) {
    this.cursor = index ?? null;
    this.readout();
  }

  readout() {
    const pointed = this.cursor !== null && this.cursor < this.drawn.at.length;
    const {at, values} = pointed ? this.drawn : {at: this.at, values: this.data};
    const index = pointed ? this.cursor : at.length - 1;
    const value = line => (pointed ? undefined : this.now[line.name]) ?? (values[line.name] || [])[index];
    patch(
      this.figure.querySelector(".now"),
      this.series
        .filter(line => this.has(line))
        .map(line =>
          h(
            "span",
            {key: line.name},
            h("i", {class: `line ${line.name}`}),
            `${line.label} `,
            h("b", {}, this.format(value(line))),
          ),
        ),
      h("span", {class: "soft", key: "at"}, pointed ? this.x.at(at[index]) : this.x.last(at[index])),
    );
  }

  /** A table with few rows: one for each point would be too long. */
  tabulate() {
    const details = this.figure.querySelector("details");
    if (!details.open) return;
    const rows = new Map();
    this.at.forEach((at, i, all) => {
      const row = this.x.row(at, i, all);
      rows.set(row, [...(rows.get(row) || []), i]);
    });
    const [title, first] = this.x.head;
    const shown = this.series.filter(line => this.has(line));
    patch(
      details.querySelector(".wide"),
      table(
        `${this.name} ${title}`,
        "minutes",
        [first, ...shown.flatMap(line => [`${line.label}, average`, "at most"])],
        [...rows].map(([row, indices]) =>
          h(
            "tr",
            {key: row},
            h("th", {scope: "row"}, this.x.rowName(row, indices, this.at)),
            shown.map(line => {
              const numbers = indices.map(i => this.data[line.name][i]).filter(value => value !== null);
              return [
                h("td", {}, this.format(numbers.length ? sum(numbers) / numbers.length : null)),
                h("td", {}, this.format(most(numbers))),
              ];
            }),
          ),
        ),
      ),
    );
  }
}

/** The charts of the last ten minutes; their cursors move together. */
export function charts() {
  return [
    new Chart(document.getElementById("bandwidth"), {
      name: "Bandwidth",
      format: rate,
      range: (_, high) => [0, Math.max(high || 0, 1000) * 1.1],
      ticks: roundTicks,
      series: [
        {name: "read", label: "read", unless: "h2d"},
        {name: "written", label: "written", dash: [6, 3], unless: "h2d"},
        {name: "h2d", label: "to the device", dash: [10, 3], optional: true},
        {name: "d2h", label: "from the device", dash: [10, 3, 2, 3], optional: true},
        {name: "sent", label: "sent", dash: [2, 3], optional: true},
      ],
    }),
    new Chart(document.getElementById("stall"), {
      name: "Stall",
      format: percent,
      range: () => [0, 1],
      ticks: () => [0, 0.25, 0.5, 0.75, 1],
      series: [{name: "stall", label: "share of the time stalled"}],
    }),
  ];
}

const fromZero = (_, high) => [0, (high || 1) * 1.1];
const around = (low, high) => uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, false);

// Ticks are round numbers, so that no digit is lost.
const short = value => Number(value.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3});

/** A chart of the means of points, and of the highest value in each. */
const withHighest = (name, mean) => ({
  name,
  format: plain,
  tick: short,
  range: around,
  series: [
    {name: mean, label: mean},
    {name: `highest_${mean}`, label: "highest", dash: [2, 3], optional: true},
  ],
});

const CURVES = [
  withHighest("Loss", "loss"),
  withHighest("Gradient norm", "norm"),
  {name: "Step time", format: seconds, range: fromZero, ticks: roundTicks, series: [{name: "seconds", label: "a step"}]},
  {
    name: "Tokens",
    format: value => (known(value) === null ? UNKNOWN : `${rough(value)}/s`),
    tick: value => `${short(value)}/s`,
    range: fromZero,
    ticks: roundTicks,
    series: [{name: "tokens", label: "of all ranks"}],
  },
];

/** The charts of training over the steps, in `box`; their cursors move together. */
export function curves(box) {
  const id = name => `curve-${name.toLowerCase().replace(" ", "-")}`;
  patch(
    box,
    CURVES.map(({name}) =>
      h(
        "figure",
        {key: name, id: id(name), class: "chart"},
        h("h3", {}, name),
        h("div", {class: "now"}),
        h("div", {class: "plot", role: "img"}),
        h("figcaption", {}),
        h("details", {}, h("summary", {}, "As a table"), h("div", {class: "wide"})),
      ),
    ),
  );
  return CURVES.map(options => new Chart(document.getElementById(id(options.name)), {...options, x: STEPS}));
}
