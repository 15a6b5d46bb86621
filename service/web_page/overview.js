// All runs that the sidecar reads, as a table. Pure: figures in, element descriptions out.

import {count, percent, plain, rough, seconds, UNKNOWN} from "./figures.js";
import {h, table} from "./patch.js";
import {runState} from "./run.js";
import {explained} from "./words.js";

const perSecond = (value, unit) => (typeof value === "number" ? `${rough(value)} ${unit}/s` : null);

/** The `runs`; `shown` is the id of the run below, `now` the time of the status. */
export function overview(runs, shown, now) {
  return table(
    "Runs",
    "overview",
    ["run", "state", "step", "step time", "throughput", "MFU", "loss", "stalled"].map(explained).concat("checkpoint", "first warning"),
    runs.map(run => {
      const warning = run.warnings.find(candidate => candidate.severity !== "info");
      const owner = run.user ? ` (${run.user})` : "";
      return h(
        "tr",
        {key: run.id, "aria-current": run.id === shown ? "true" : null},
        h("th", {scope: "row"}, h("a", {href: `#${new URLSearchParams({run: run.id})}`}, run.name), owner),
        h("td", {class: "left"}, runState(run, "state")),
        [
          count(run.step),
          seconds(run.step_seconds),
          perSecond(run.tokens_per_second, "tokens") ?? perSecond(run.samples_per_second, "samples") ?? UNKNOWN,
          percent(run.mfu),
          plain(run.loss),
          percent(run.stall_share),
          run.checkpoint_at ? `${seconds(Math.max(0, Math.round(now - run.checkpoint_at)))} ago` : UNKNOWN,
        ].map(cell => h("td", {}, cell)),
        h("td", {class: "left reason"}, warning ? warning.text : "none"),
      );
    }),
  );
}
