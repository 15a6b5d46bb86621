// The summary of a run, and its warnings. Pure: figures in, element descriptions out.

import {clock, count, most, percent, plain, plural, rate, rough, seconds, sum, UNKNOWN} from "./figures.js";
import {h, marked} from "./patch.js";
import {link, moving, overSteps} from "./totals.js";
import {explained} from "./words.js";

const RUN_STATES = {
  training: ["Training", "good"],
  stuck: ["Stuck", "bad"],
  degraded: ["Degraded", "poor"],
  ended: ["Ended", "over"],
};

const SEVERITIES = {error: ["Error", "bad"], warning: ["Warning", "poor"], info: ["Note", "note"]};

export const runState = (run, look = "state badge") => {
  const [word, shape] = RUN_STATES[run.state] || [run.state, "note"];
  return marked([explained(word), shape], look);
};

/** Links to the run in other tools; a directory is the one that TensorBoard reads. */
export function links(run) {
  return Object.entries(run.links || {}).map(([name, place], i) => [
    i ? " · " : "",
    // The names and the places come from a status file: only these two schemes become links.
    /^https?:\/\//.test(place)
      ? h("a", {key: name, href: place, target: "_blank", rel: "noreferrer"}, name)
      : h("span", {key: name}, `${name} `, h("code", {}, place)),
  ]);
}

const MOST_NODES = 4;

/** `place` is where the ranks of the run are: "on this node". */
export function about(run, place) {
  const nodes = [...new Set(run.ranks.map(rank => rank.node).filter(Boolean))];
  const parts = [
    run.device,
    nodes.length ? `on ${nodes.length > MOST_NODES ? plural(nodes.length, "node") : nodes.join(", ")}` : null,
    run.ranks_expected > 1 || run.world_size > 1
      ? `${count(run.ranks_live)} of ${plural(run.ranks_expected, "rank")} live ${place}` +
        (run.world_size > run.ranks_expected ? `, ${count(run.world_size)} in total` : "")
      : null,
    run.started_at
      ? `since ${new Date(run.started_at * 1000).toLocaleString("en-GB", {dateStyle: "medium", timeStyle: "short"})}`
      : null,
  ];
  if (run.user) parts.push(`user ${run.user}`);
  for (const [name, value] of Object.entries(run.labels || {})) parts.push(`${name.replaceAll("_", " ")} ${value}`);
  return [parts.filter(Boolean).join(" · "), run.id !== run.name ? [" · ", h("code", {}, run.id)] : null];
}

/** The phase of the ranks, with its duration if it is long. */
function phase(ranks, run, at) {
  const phases = [...new Set(ranks.map(rank => rank.phase))];
  if (phases.length !== 1) return phases.length ? "phases differ" : "";
  const since = most(ranks.map(rank => (rank.phase_since ? at - rank.phase_since : null)));
  return `in ${phases[0]}${since > Math.max(10, 3 * (run.step_seconds || 0)) ? ` for ${seconds(since)}` : ""}`;
}

/** The duration of the last step; of a live run (`at` is the time), its age if that is long. */
function lastStep(run, duration, at) {
  const age = at !== null && run.last_step_at ? at - run.last_step_at : 0;
  if (age > Math.max(10, 5 * (run.step_seconds || 0))) return `last step ${seconds(age)} ago`;
  return duration === null ? "" : `last one ${seconds(duration)}`;
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

/** Tokens per second, with the operations of the model; null if the inputs have no tokens. */
function tokens(of) {
  if (typeof of.tokens_per_second !== "number") return null;
  const flops =
    typeof of.flops_per_second === "number" ? [`${rough(of.flops_per_second / 1e12)} `, explained("TFLOP/s"), " a device"] : null;
  const used = typeof of.mfu === "number" ? [", ", explained("MFU"), ` ${percent(of.mfu)}`] : null;
  return ["Tokens", `${rough(of.tokens_per_second)}/s`, [flops, used]];
}

/** The mean utilisation of the GPUs, their power, and the highest temperature; null without NVML. */
function gpus(ranks) {
  const known = ranks.map(rank => rank.gpu).filter(Boolean);
  const all = name => known.map(gpu => gpu[name]).filter(value => typeof value === "number");
  if (!known.length) return null;
  const used = all("utilization"),
    hottest = most(all("temperature"));
  return [
    "GPU",
    used.length ? percent(sum(used) / used.length) : UNKNOWN,
    [
      all("power").length ? `${count(sum(all("power")))}\u00a0W` : null,
      hottest === null ? null : `${count(hottest)}\u00a0°C`,
    ]
      .filter(Boolean)
      .join(", "),
  ];
}

/** Facts of all `ranks`, or of the only one. */
export function facts(run, ranks, at) {
  const alone = ranks.length === 1 && run.ranks.length > 1;
  const of = alone ? ranks[0] : run;
  const last = most(ranks.map(rank => rank.steps.at(-1)?.seconds));
  const first = ranks[0] || {};
  const live = run.state !== "ended";
  // A second holds a part of a step, or a few steps: its rates change too fast to read. A stuck run has no new step.
  const isStuck = run.state === "stuck";
  const rates = isStuck
    ? {read: sum(ranks.map(rank => moving(rank, "read"))), written: sum(ranks.map(rank => moving(rank, "written")))}
    : {read: overSteps(ranks, "read_bytes"), written: overSteps(ranks, "written_bytes")};
  const when = isStuck ? "now" : "over the recent steps";
  const until = live ? at : most(ranks.map(rank => at - (rank.heartbeat_age ?? 0)));
  const extra = [
    ["gradient norm", first.gradient_norm],
    ["lr", first.learning_rate],
    ["loss scale", first.loss_scale],
  ]
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => ({name, shown: [explained(name), ` ${rough(value)}`]}));
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
    ["Step time", seconds(of.step_seconds), lastStep(run, last, live ? at : null)],
    ["Stalled", percent(of.stall_share), "of the recent steps"],
    [
      "Samples",
      typeof run.samples_per_second === "number" ? `${rough(run.samples_per_second)}/s` : UNKNOWN,
      first.samples ? `${count(first.samples)} of all ranks` : "",
    ],
    tokens(of),
    [
      "Loss",
      typeof of.loss === "string" ? h("span", {class: "bad"}, plain(of.loss)) : plain(of.loss),
      first.skipped_steps ? `${plural(first.skipped_steps, "step")} skipped` : extra[0]?.shown || "",
    ],
    swaps ? ["Reading", live ? rate(rates.read) : UNKNOWN, `from NVMe, ${when}`] : null,
    swaps ? ["Writing", live ? rate(rates.written) : UNKNOWN, `to NVMe, ${when}`] : null,
    gpus(ranks),
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
      extra.find(({name}) => name === "lr")?.shown || "",
    ],
    checkpoint(ranks, at),
  ]
    .filter(Boolean)
    .map(([name, value, more]) =>
      h("div", {key: name}, h("dt", {}, name === "Checkpoint" ? name : explained(name)), h("dd", {}, value), h("dd", {class: "more"}, more)),
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
