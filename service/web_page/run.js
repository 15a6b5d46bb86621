// The summary of a run, and its warnings. Pure: figures in, element descriptions out.

import {clock, count, most, percent, plain, plural, rate, rough, seconds, UNKNOWN} from "./figures.js";
import {h, marked} from "./patch.js";
import {link, moving} from "./totals.js";

const RUN_STATES = {training: ["Training", "good"], degraded: ["Degraded", "poor"], ended: ["Ended", "over"]};

const SEVERITIES = {error: ["Error", "bad"], warning: ["Warning", "poor"], info: ["Note", "note"]};

export const runState = run => marked(RUN_STATES[run.state] || [run.state, "note"], "state badge");

export function about(run) {
  const nodes = [...new Set(run.ranks.map(rank => rank.node).filter(Boolean))];
  const said = [
    run.device,
    nodes.length ? `on ${nodes.join(", ")}` : null,
    run.ranks_expected > 1 || run.world_size > 1
      ? `${count(run.ranks_live)} of ${plural(run.ranks_expected, "rank")} live on this node` +
        (run.world_size > run.ranks_expected ? `, ${count(run.world_size)} in total` : "")
      : null,
    run.started_at
      ? `since ${new Date(run.started_at * 1000).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"})}`
      : null,
  ];
  return [said.filter(Boolean).join(" · "), run.id !== run.name ? [" · ", h("code", {}, run.id)] : null];
}

/** The phase of the ranks, with its duration if it is long. */
function phase(ranks, run, at) {
  const phases = [...new Set(ranks.map(rank => rank.phase))];
  if (phases.length !== 1) return phases.length ? "phases differ" : "";
  const since = most(ranks.map(rank => (rank.phase_since ? at - rank.phase_since : null)));
  return `in ${phases[0]}${since > Math.max(10, 3 * (run.step_seconds || 0)) ? ` for ${seconds(since)}` : ""}`;
}

function checkpoint(ranks, at) {
  const save = ranks
    .map(rank => rank.checkpoint)
    .find(candidate => candidate && (candidate.under_way || candidate.saved || candidate.failed));
  if (!save) return null;
  const many = [
    save.saved ? `${count(save.saved)} saved` : null,
    save.failed ? `${count(save.failed)} failed` : null,
  ];
  const word = save.under_way
    ? "saving"
    : save.error
      ? h("span", {class: "bad"}, "failed")
      : `${seconds(Math.round(at - save.ended_at))} ago`;
  return [
    "Checkpoint",
    word,
    [...many, save.seconds ? `took ${seconds(save.seconds)}` : null].filter(Boolean).join(", "),
  ];
}

/** Facts of all `ranks`, or of the only one. */
export function facts(run, ranks, at) {
  const alone = ranks.length === 1 && run.ranks.length > 1;
  const of = alone ? ranks[0] : run;
  const last = most(ranks.map(rank => rank.steps.at(-1)?.seconds));
  const first = ranks[0] || {};
  const live = run.state !== "ended";
  const rates = alone
    ? {read: moving(first, "read"), written: moving(first, "written")}
    : run.latest || {read: null, written: null};
  const until = live ? at : most(ranks.map(rank => at - (rank.heartbeat_age ?? 0)));
  const extra = [
    ["gradient norm", first.gradient_norm],
    ["lr", first.learning_rate],
    ["loss scale", first.loss_scale],
  ]
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => `${name} ${rough(value)}`);
  const swaps = ranks.some(rank => rank.io.length);
  const copied = link(ranks);
  return [
    [
      "Step",
      count(of.step),
      [
        first.global_step > first.step ? `${count(first.global_step)} in total` : null,
        live ? phase(ranks, run, at) : null,
      ]
        .filter(Boolean)
        .join(", "),
    ],
    ["Step time", seconds(of.step_seconds), last === null ? "" : `last one ${seconds(last)}`],
    ["Stalled", percent(of.stall_share), "of the recent steps"],
    [
      "Samples",
      typeof run.samples_per_second === "number" ? `${rough(run.samples_per_second)}/s` : UNKNOWN,
      first.samples ? `${count(first.samples)} of all ranks` : "",
    ],
    [
      "Loss",
      typeof of.loss === "string" ? h("span", {class: "bad"}, plain(of.loss)) : plain(of.loss),
      first.skipped_steps ? `${plural(first.skipped_steps, "step")} skipped` : extra[0] || "",
    ],
    swaps ? ["Reading", live ? rate(rates.read) : UNKNOWN, "from NVMe"] : null,
    swaps ? ["Writing", live ? rate(rates.written) : UNKNOWN, "to NVMe"] : null,
    copied
      ? [
          "Copying",
          live ? rate(copied.h2d.rate) : UNKNOWN,
          `to the device, ${live ? rate(copied.d2h.rate) : UNKNOWN} from it`,
        ]
      : null,
    [
      "Running for",
      run.started_at && until ? seconds(Math.max(0, until - run.started_at)) : UNKNOWN,
      extra.find(text => text.startsWith("lr")) || "",
    ],
    checkpoint(ranks, at),
  ]
    .filter(Boolean)
    .map(([name, value, more]) =>
      h("div", {key: name}, h("dt", {}, name), h("dd", {}, value), h("dd", {class: "more"}, more)),
    );
}

// Text between backticks is code.
const prose = text => text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));

/** Descriptions of the warnings `from` the first of them `to` before another. */
export function warnings(run, from, to) {
  const several = run.ranks.length > 1;
  return run.warnings
    .slice(from, to)
    .map(({code, severity, ranks, text, remedy}) =>
      h(
        "li",
        {key: `${code} ${ranks.join()}`, class: (SEVERITIES[severity] || SEVERITIES.info)[1]},
        h(
          "p",
          {},
          marked(SEVERITIES[severity] || [severity, "note"], "severity"),
          " ",
          several && ranks.length
            ? h("span", {class: "whom"}, `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")}: `)
            : null,
          prose(text),
        ),
        remedy ? h("p", {class: "remedy"}, prose(remedy)) : null,
      ),
    );
}

export const versions = run =>
  Object.entries(run?.versions || {})
    .map(([name, version]) => `${name} ${version}`)
    .join(" · ");

/** Changes since `before`, for screen readers; empty if there are none. */
export function news(before, run, at) {
  if (!before || before.id !== run.id) return `Run ${run.name}: ${(RUN_STATES[run.state] || [run.state])[0]}`;
  const previous = new Set(before.warnings.map(warning => warning.code));
  return [
    before.state !== run.state
      ? `Run ${run.name} is now: ${(RUN_STATES[run.state] || [run.state])[0]}, ${clock(at)}`
      : null,
    ...run.warnings
      .filter(warning => !previous.has(warning.code) && warning.severity !== "info")
      .map(warning => `${(SEVERITIES[warning.severity] || [warning.severity])[0]}: ${warning.text}`),
  ]
    .filter(Boolean)
    .join(". ");
}
