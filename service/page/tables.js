// Tiers, plan, paths and ranks as bars and tables: of figures to descriptions of elements. Pure.

import {bytes, count, most, percent, plural, rate, seconds, sum, UNKNOWN} from "./figures.js";
import {h, marked, table} from "./patch.js";
import {median} from "./totals.js";

const KINDS = [
  "parameters",
  "gradients",
  "optimizer state",
  "unsharded groups",
  "staging",
  "local gradients",
  "gradient reduction",
  "checkpoint",
  "idle windows",
];

const kindClass = kind => (KINDS.includes(kind) ? `kind-${kind.replaceAll(" ", "-")}` : "kind-other");

const RANK_STATES = {
  live: ["live", "good"],
  silent: ["silent", "poor"],
  stale: ["gone", "over"],
  torn: ["torn", "poor"],
  "newer-version": ["newer version", "poor"],
  unreadable: ["unreadable", "bad"],
};

function tier(one) {
  const place = kind => (KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length);
  const used = Object.entries(one.by_kind)
    .filter(([, size]) => size > 0)
    .sort(([a], [b]) => place(a) - place(b) || (a < b ? -1 : 1));
  const rest = one.used - sum(used.map(([, size]) => size));
  if (rest > 0) used.push(["other", rest]);
  // The budget stands at nine tenths, so that what goes past it shows.
  const scale = Math.max(one.budget / 0.9, one.used, one.peak, 1);
  const share = value => `${(100 * value) / scale}%`;
  const ofBudget = value => (one.budget ? percent(value / one.budget) : UNKNOWN);
  const over = one.budget && one.used > one.budget;
  return h(
    "div",
    {key: one.name, class: "tier", role: "group", "aria-label": `Tier ${one.name}`},
    h(
      "div",
      {class: "tier-head"},
      h("h3", {}, one.name === "nvme" ? "NVMe" : one.name),
      h(
        "span",
        {class: over ? "bad" : ""},
        h("b", {}, bytes(one.used)),
        ` of ${bytes(one.budget)} budget · ${ofBudget(one.used)}`,
      ),
    ),
    h(
      "div",
      {class: "track", "aria-hidden": "true"},
      h(
        "div",
        {class: "fill"},
        used.map(([kind, size]) =>
          h("i", {
            key: kind,
            class: kindClass(kind),
            style: {width: share(size)},
            title: `${kind} ${bytes(size)}`,
          }),
        ),
      ),
      one.budget ? h("i", {class: "beyond", style: {left: share(one.budget)}}) : null,
      one.budget
        ? h("i", {class: "budget", style: {left: share(one.budget)}, title: `budget ${bytes(one.budget)}`})
        : null,
      one.peak
        ? h("i", {class: "peak", style: {left: share(one.peak)}, title: `peak ${bytes(one.peak)}`})
        : null,
    ),
    h(
      "ul",
      {class: "legend"},
      used.map(([kind, size]) =>
        h(
          "li",
          {key: kind},
          h("i", {class: `swatch ${kindClass(kind)}`}),
          `${kind} `,
          h("b", {}, bytes(size)),
        ),
      ),
    ),
    h(
      "p",
      {class: "soft"},
      h("i", {class: "peak-sign"}),
      `peak ${bytes(one.peak)}, ${ofBudget(one.peak)} of budget`,
      one.capacity ? ` · machine has ${bytes(one.capacity)}` : "",
      typeof one.available === "number" ? `, ${bytes(one.available)} free` : "",
    ),
  );
}

export function tiers(all, ranks) {
  const used = all.filter(one => one.budget || one.used || one.peak);
  const idle = all.filter(one => !used.includes(one)).map(one => (one.name === "nvme" ? "NVMe" : one.name));
  const kept = ranks.map(rank => rank.activations).filter(Boolean);
  return [
    used.map(tier),
    idle.length ? h("p", {class: "soft", key: "idle"}, `Not used: ${idle.join(", ")}.`) : null,
    kept.length
      ? h(
          "p",
          {class: "soft", key: "beside"},
          `Beside the tiers, activations take ${bytes(sum(kept.map(one => one.used)))}, at most ${bytes(sum(kept.map(one => one.peak)))}.`,
        )
      : null,
    !used.length && !kept.length ? h("p", {class: "soft", key: "none"}, "No rank tells of its tiers.") : null,
  ];
}

function verdict(planned, found) {
  if (typeof found !== "number") return ["not known yet", ""];
  if (!planned) return found ? ["not planned", "poor"] : ["as planned", "good"];
  const off = found / planned - 1;
  if (Math.abs(off) < 0.02) return ["as planned", "good"];
  if (off >= 1) return [`${(found / planned).toFixed(1)} times as much`, "poor"];
  return off > 0 ? [`${percent(off)} more`, off > 0.05 ? "poor" : "good"] : [`${percent(-off)} less`, "note"];
}

export function plan(rows, details) {
  if (!rows.length) return h("p", {class: "soft"}, "No rank tells of its plan.");
  const body = rows.map(({name, planned, found}) => {
    const [word, shape] = verdict(planned, found);
    const scale = Math.max(planned / 0.75, found || 0, 1);
    return h(
      "tr",
      {key: name},
      h("th", {scope: "row"}, name.replace(/^nvme/, "NVMe")),
      h("td", {}, bytes(planned)),
      h("td", {}, bytes(found)),
      h(
        "td",
        {class: "compared"},
        h(
          "div",
          {class: "track small", "aria-hidden": "true"},
          h(
            "div",
            {class: "fill"},
            h("i", {class: `found ${shape}`, style: {width: `${(100 * (found || 0)) / scale}%`}}),
          ),
          h("i", {class: "budget", style: {left: `${(100 * planned) / scale}%`}}),
        ),
        h("span", {class: "verdict"}, word),
      ),
    );
  });
  return [
    table("Plan against reality", "", ["quantity", "planned", "found", "so it is"], body),
    h(
      "p",
      {class: "soft", key: "details"},
      "Per tier its peak, and what a step of the recent ones moved (the median).",
      details ? ` ${details}` : "",
    ),
  ];
}

/** The plan in one sentence. */
export function planned(ranks) {
  const one = ranks[0]?.plan;
  if (!one) return "";
  return (
    [
      one.parameters ? `${count(one.parameters)} parameters in ${plural(one.groups, "group")}` : null,
      one.micro_batches > 1 ? `${count(one.micro_batches)} micro-batches a step` : null,
      one.state_format ? `state ${one.state_format}` : null,
    ]
      .filter(Boolean)
      .join(", ") + "."
  );
}

const errors = way =>
  way.errors
    ? h(
        "span",
        {class: "state bad"},
        h("i", {class: "mark"}),
        Object.entries(way.errors_by_errno)
          .map(([name, many]) => `${count(many)} ${name}`)
          .join(", ") || count(way.errors),
      )
    : "0";

function direction(word, way) {
  return h(
    "tr",
    {},
    h("th", {scope: "row"}, word),
    [
      rate(way.bytes_per_second),
      rate(way.average_bytes_per_second),
      rate(way.peak_bytes_per_second),
      seconds(way.p50),
      seconds(way.p99),
      count(way.in_flight),
      bytes(way.bytes),
      count(way.retries),
      errors(way),
    ].map(cell => h("td", {}, cell)),
  );
}

export function paths(all, ranks) {
  if (!all.length) return h("p", {class: "soft"}, "Nothing is swapped to NVMe.");
  const engine = ranks.map(rank => rank.io_engine).find(Boolean);
  const bodies = all.map(one => [
    h(
      "tr",
      {},
      h(
        "th",
        {scope: "rowgroup", colspan: "10", class: "path"},
        h(
          "div",
          {},
          h("code", {}, one.path),
          " ",
          h(
            "span",
            {class: "soft"},
            [
              one.engine,
              one.direct ? "direct" : "through the page cache",
              one.queue_full_seconds > 0 ? `queue full for ${seconds(one.queue_full_seconds)}` : null,
              one.measured ? `measured at ${rate(one.measured)}` : null,
            ]
              .filter(Boolean)
              .join(", "),
          ),
        ),
      ),
    ),
    direction("read", one.read),
    direction("written", one.written),
  ]);
  const flags = (engine?.flags || []).map(flag => flag.replaceAll("_", " "));
  const missing = Object.entries(engine?.passed_over || {}).map(
    ([what, why]) => `${what.replaceAll("_", " ")}: ${why}`,
  );
  return [
    table(
      "Paths",
      "paths",
      ["direction", "now", "average", "peak", "p50", "p99", "in flight", "in all", "retries", "errors"],
      ...bodies,
    ),
    engine
      ? h(
          "p",
          {class: "soft", key: "engine"},
          `I/O engine ${engine.name}`,
          flags.length ? ` with ${flags.join(", ")}` : "",
          engine.registered_bytes ? `, ${bytes(engine.registered_bytes)} registered` : "",
          ".",
          missing.length ? ` Not to be had: ${missing.join("; ")}.` : "",
          " Averages are over the time with transfers in flight, peaks over a quarter of a second.",
        )
      : null,
  ];
}

const heard = age => (age === null ? UNKNOWN : age < 1.5 ? "just now" : `${seconds(age)} ago`);

// A rank that is not heard moves nothing that we know of.
const moving = (rank, way) =>
  rank.state === "live" ? rate(sum(rank.io.map(path => path[way].bytes_per_second))) : UNKNOWN;

export function ranks(run) {
  const rows = run.ranks.map((rank, place) => {
    const known = rank.pid !== null,
      last = rank.steps.at(-1);
    const rest = known
      ? [
          rank.node || UNKNOWN,
          count(rank.step),
          rank.phase,
          heard(rank.heartbeat_age),
          seconds(median(rank.steps.map(step => step.seconds))),
          last && last.seconds > 0
            ? percent(sum(rank.steps.map(step => step.stall)) / sum(rank.steps.map(step => step.seconds)))
            : UNKNOWN,
          moving(rank, "read"),
          moving(rank, "written"),
          String(rank.pid),
        ]
      : Array(9).fill(UNKNOWN);
    return h(
      "tr",
      {key: `${rank.rank} ${rank.pid ?? place}`},
      h("th", {scope: "row"}, String(rank.rank)),
      h("td", {class: "left"}, marked(RANK_STATES[rank.state] || [rank.state, "note"])),
      rest.map(cell => h("td", {}, cell)),
      h("td", {class: "left reason"}, rank.reason || rank.broken || ""),
    );
  });
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
        "heard",
        "step time",
        "stalled",
        "reads",
        "writes",
        "pid",
        "why",
      ],
      rows,
    ),
    missing > 0
      ? h(
          "p",
          {class: "soft", key: "missing"},
          `${plural(missing, "rank")} of this run should be on this node and ${missing === 1 ? "is" : "are"} not here.`,
        )
      : null,
  ];
}

export function collectives(all) {
  return table(
    "Collectives",
    "",
    ["collective", "now", "sent in all", "calls"],
    all.map(one =>
      h(
        "tr",
        {key: one.kind},
        h("th", {scope: "row"}, one.kind),
        h("td", {}, rate(one.rate)),
        h("td", {}, bytes(one.sent)),
        h("td", {}, count(one.calls)),
      ),
    ),
  );
}
