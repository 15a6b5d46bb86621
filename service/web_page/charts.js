// Bandwidth and stalls over the last ten minutes: the entries of /v1/history, then the latest entry of each event.

import {clock, most, percent, plural, rate, sum} from "./figures.js";
import {h, patch, table} from "./patch.js";

const WINDOW = 600; // seconds
const GAP = 10; // seconds
const POINTS = 120; // of a line

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
  const rough = Math.max(high, 4) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  const ticks = [];
  for (let tick = 0; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

class Chart {
  constructor(figure, {name, series, format, top, ticks}) {
    Object.assign(this, {
      name,
      series,
      format,
      top,
      ticks,
      figure,
      plot: null,
      at: [],
      data: {},
      drawn: {at: [], values: {}},
      cursor: null,
    });
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
        cursor: {sync: {key: "tierd"}, drag: {x: false, y: false}, y: false, points: {size: 6}},
        scales: {x: {time: true}, y: {range: (_, low, high) => [0, this.top(high)]}},
        axes: [
          {...axis, grid: {show: false}, space: 90, size: 30, values: (_, ticks) => ticks.map(clock)},
          {...axis, size: 74, splits: this.ticks, values: (_, ticks) => ticks.map(tick => this.format(tick))},
        ],
        series: [
          {},
          ...this.series.map(line => {
            const solid = color(line.name);
            return {
              label: line.label,
              stroke: solid,
              fill: line.dash ? undefined : faint(solid),
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

  show({at, values}) {
    this.at = at;
    this.data = values;
    this.drawn = thinned({at, values});
    if (!this.plot || this.shown !== this.visibility()) this.restart();
    else this.plot.setData([this.drawn.at, ...this.series.map(line => this.drawn.values[line.name])]);
    const summary = this.summary();
    this.box.setAttribute("aria-label", `${this.name} over time. ${summary}`);
    patch(this.figure.querySelector("figcaption"), summary);
    this.readout();
    this.tabulate();
  }

  summary() {
    const minutes = this.at.length > 1 ? (this.at.at(-1) - this.at[0]) / 60 : 0;
    if (!minutes) return "Figures appear within a few seconds.";
    const over =
      minutes < 1.5 ? plural(Math.round(60 * minutes), "second") : plural(Math.round(minutes), "minute");
    return (
      `Over ${over}: ` +
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
            h("b", {}, this.format((values[line.name] || [])[index])),
          ),
        ),
      h("span", {class: "soft", key: "at"}, pointed ? `at ${clock(at[index])}` : "now"),
    );
  }

  /** A table by minute: one row per second would be too long. */
  tabulate() {
    const details = this.figure.querySelector("details");
    if (!details.open) return;
    const minutes = new Map();
    this.at.forEach((at, i) =>
      minutes.set(Math.floor(at / 60), [...(minutes.get(Math.floor(at / 60)) || []), i]),
    );
    const shown = this.series.filter(line => this.has(line));
    patch(
      details.querySelector(".wide"),
      table(
        `${this.name} by minute`,
        "minutes",
        ["minute from", ...shown.flatMap(line => [`${line.label}, average`, "at most"])],
        [...minutes].map(([minute, indices]) =>
          h(
            "tr",
            {key: minute},
            h("th", {scope: "row"}, clock(60 * minute)),
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

/** The two charts; their cursors move together. */
export function charts() {
  return [
    new Chart(document.getElementById("bandwidth"), {
      name: "Bandwidth",
      format: rate,
      top: high => Math.max(high || 0, 1000) * 1.1,
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
      top: () => 1,
      ticks: () => [0, 0.25, 0.5, 0.75, 1],
      series: [{name: "stall", label: "share of the time stalled"}],
    }),
  ];
}
