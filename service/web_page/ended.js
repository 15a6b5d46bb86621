// Runs that ended, with their last figures. Pure: figures in, element descriptions out.

import {clock, count, plain, seconds, UNKNOWN} from "./figures.js";
import {h, marked, table} from "./patch.js";

const HOW = {
  finished: ["finished", "over"],
  preempted: ["stopped", "over"],
  failed: ["failed", "bad"],
  died: ["died", "bad"],
  unknown: ["unknown", "note"],
};

export function ended(all) {
  return table(
    "Runs that ended",
    "ended",
    ["run", "how", "at", "duration", "step", "loss", "last warning"],
    all.map(run => {
      const [first, ...others] = run.warnings.filter(warning => warning.severity !== "info");
      return h(
        "tr",
        {key: run.id},
        h("th", {scope: "row"}, run.name),
        h("td", {class: "left", title: run.why}, marked(HOW[run.how] || [run.how, "note"])),
        h("td", {}, clock(run.ended_at)),
        h("td", {}, run.started_at && run.ended_at ? seconds(run.ended_at - run.started_at) : UNKNOWN),
        h("td", {}, count(run.step)),
        h("td", {}, plain(run.loss)),
        h("td", {class: "left reason"}, first ? first.text : "none", others.length ? ` (and ${others.length} more)` : ""),
      );
    }),
  );
}
