// The ranks of a run as a table. Pure: figures in, element descriptions out.

import {count, percent, plural, rate, seconds, UNKNOWN} from "./figures.js";
import {h, marked, table} from "./patch.js";
import {moving} from "./totals.js";
import {explained} from "./words.js";

const RANK_STATES = {
  live: ["live", "good"],
  silent: ["silent", "poor"],
  stale: ["stale", "over"],
  torn: ["torn", "poor"],
  "newer-version": ["newer version", "poor"],
  unreadable: ["unreadable", "bad"],
  unreachable: ["unreachable", "bad"],
};

const published = age => (age === null ? UNKNOWN : age < 1.5 ? "just now" : `${seconds(age)} ago`);

// The current rate of a rank that does not publish is unknown.
const moves = (rank, way) => (rank.state === "live" ? rate(moving(rank, way)) : UNKNOWN);

const copies = (rank, way) =>
  rank.state === "live" && rank.link ? rate(rank.link[way].bytes_per_second) : UNKNOWN;

const MOST_RANKS = 64;

const state = rank =>
  rank.straggler && rank.state === "live" ? ["straggler", "poor"] : RANK_STATES[rank.state] || [rank.state, "note"];

/** The number of a rank, with its place in a mesh: "3 (data 1, sequence 1)". */
const name = ({rank, mesh}) => {
  const place = Object.entries(mesh || {}).map(([dimension, place]) => `${dimension} ${place}`);
  return place.length > 0 ? `${rank} (${place.join(", ")})` : String(rank);
};

const stateCell = ([word, shape]) => marked([explained(word), shape]);

/** Ranks with a problem first, then stragglers, then by rank. */
const order = rank => (rank.state !== "live" ? 0 : rank.straggler ? 1 : 2);

/** `place` is where the ranks of the run are: "on this node". */
export function ranks(run, place) {
  const linked = run.ranks.some(rank => rank.link);
  const sorted = [...run.ranks].sort((a, b) => order(a) - order(b) || a.rank - b.rank);
  const rows = sorted.slice(0, MOST_RANKS).map((rank, row) => {
    const rest = rank.pid !== null
      ? [
          rank.node || UNKNOWN,
          count(rank.step),
          rank.phase,
          published(rank.heartbeat_age),
          seconds(rank.step_seconds),
          percent(rank.stall_share),
          moves(rank, "read"),
          moves(rank, "written"),
          ...(linked ? [copies(rank, "h2d"), copies(rank, "d2h")] : []),
          String(rank.pid),
        ]
      : Array(linked ? 11 : 9).fill(UNKNOWN);
    return h(
      "tr",
      {key: `${rank.rank} ${rank.pid ?? row}`},
      h("th", {scope: "row"}, name(rank)),
      h("td", {class: "left"}, stateCell(state(rank))),
      rest.map(cell => h("td", {}, cell)),
      h("td", {class: "left reason"}, rank.reason || rank.broken || ""),
    );
  });
  const more = run.ranks.length - MOST_RANKS;
  const missing = run.ranks_expected - run.ranks.length;
  return [
    table(
      "Ranks",
      "ranks",
      [
        "rank",
        "state",
        "node",
        "step",
        "phase",
        "heartbeat",
        "step time",
        "stalled",
        "reads",
        "writes",
        ...(linked ? ["to device", "from device"] : []),
        "pid",
        "why",
      ].map(explained),
      rows,
    ),
    missing > 0
      ? h(
          "p",
          {class: "soft", key: "missing"},
          `${plural(missing, "rank")} of this run ${missing === 1 ? "is" : "are"} missing ${place}.`,
        )
      : null,
    more > 0 ? h("p", {class: "soft", key: "more"}, `${plural(more, "more rank")}.`) : null,
  ];
}
