// The recent steps as bars, as high as their duration: phases, and stalls by cause within them.

import {count, most, moved, percent, plural, seconds, sum} from "./figures.js";
import {slowest} from "./totals.js";
import {h, patch} from "./patch.js";
import {explained} from "./words.js";

// Phase names as in the API; a step's record has another name for the last one.
const PHASES = {forward: "forward", backward: "backward", step: "update"};
export const causeClass = cause => `cause-${cause.replaceAll(/[^a-z]+/g, "-")}`;

const phaseClass = name => `phase-${name.split(" ")[0]}`;

function parts(step) {
  const named = Object.entries(PHASES).map(([name, key]) => [name, step[key]]);
  return [...named, ["between phases", Math.max(0, step.seconds - sum(named.map(([, time]) => time)))]];
}

const causes = step => {
  const named = Object.entries(step.stalls || {})
    .filter(([, time]) => time > 0)
    .sort((a, b) => b[1] - a[1]);
  return named.length || !(step.stall > 0) ? named : [["unknown", step.stall]];
};

const words = step =>
  `Step ${count(step.step)}: ${seconds(step.seconds)}; ` +
  parts(step)
    .map(([name, time]) => `${name} ${seconds(time)}`)
    .join(", ") +
  `; stalled ${seconds(step.stall)}` +
  (step.stall > 0
    ? ` (${causes(step)
        .map(([cause, time]) => `${cause} ${seconds(time)}`)
        .join(", ")})`
    : "");

function bar(step, longest, chosen) {
  const share = value => `${(100 * value) / longest}%`;
  return h(
    "div",
    {
      key: step.step,
      role: "option",
      id: `step-${step.step}`,
      class: "step",
      "data-step": step.step,
      "aria-selected": String(chosen),
      "aria-label": words(step),
    },
    h(
      "div",
      {class: "phases"},
      parts(step).map(([name, time]) => h("i", {class: phaseClass(name), style: {height: share(time)}})),
    ),
    h(
      "div",
      {class: "waits"},
      causes(step).map(([cause, time]) => h("i", {class: causeClass(cause), style: {height: share(time)}})),
    ),
  );
}

function line(kind, name, time, whole) {
  return h(
    "tr",
    {},
    h("th", {scope: "row"}, h("i", {class: `swatch ${kind}`}), name),
    h("td", {}, seconds(time)),
    h("td", {}, percent(whole > 0 ? time / whole : 0)),
  );
}

function breakdown(step, follows) {
  return h(
    "div",
    {class: "step-told"},
    h("h3", {}, `Step ${count(step.step)}`, follows ? h("span", {class: "soft"}, " the last one") : null),
    h(
      "table",
      {},
      h("caption", {class: "hidden"}, `Where the time of step ${step.step} went`),
      h(
        "thead",
        {class: "hidden"},
        h(
          "tr",
          {},
          ["part", "time", "share"].map(name => h("th", {scope: "col"}, name)),
        ),
      ),
      h(
        "tbody",
        {},
        parts(step).map(([name, time]) => line(phaseClass(name), explained(name), time, step.seconds)),
        h(
          "tr",
          {class: "total"},
          h("th", {scope: "row"}, "total"),
          h("td", {}, seconds(step.seconds)),
          h("td", {}, ""),
        ),
      ),
      h(
        "tbody",
        {},
        h(
          "tr",
          {class: "within"},
          h("th", {scope: "row"}, "of which ", explained("stall")),
          h("td", {}, seconds(step.stall)),
          h("td", {}, percent(step.seconds > 0 ? step.stall / step.seconds : 0)),
        ),
        causes(step).map(([cause, time]) => line(causeClass(cause), ["for ", explained(cause)], time, step.seconds)),
      ),
    ),
    h(
      "p",
      {class: "soft"},
      `read ${moved(step.read_bytes)}, wrote ${moved(step.written_bytes)}`,
      step.h2d_bytes || step.d2h_bytes
        ? `, copied ${moved(step.h2d_bytes)} to the device and ${moved(step.d2h_bytes)} from it`
        : "",
      step.sent_bytes ? `, sent ${moved(step.sent_bytes)}` : "",
      step.activation_bytes
        ? `; of activations, ${moved(step.activation_bytes)} left the device, ` +
            `read ${moved(step.activation_read_bytes)}, wrote ${moved(step.activation_written_bytes)}`
        : "",
    ),
  );
}

/** Shows the steps of a rank in `box`; arrow keys, a click or the pointer select a step, Escape the last one. */
export class Steps {
  constructor(box) {
    this.box = box;
    this.chosen = null; // step number; null: the last step
    this.pointed = null;
    this.steps = [];
    this.rank = null;
    box.addEventListener("keydown", event => this.key(event));
    box.addEventListener("click", event => this.choose(this.under(event)));
    box.addEventListener("pointermove", event => this.point(this.under(event)));
    box.addEventListener("pointerleave", () => this.point(null));
  }

  show(ranks, scope) {
    const rank = slowest(ranks);
    if (rank?.rank !== this.rank?.rank || rank?.pid !== this.rank?.pid) this.chosen = this.pointed = null;
    this.rank = rank;
    this.of = ranks.length > 1 && scope === null && rank ? `rank ${rank.rank}, the rank with the longest steps` : "";
    this.steps = rank ? rank.steps : [];
    this.draw();
  }

  under(event) {
    const found = event.target.closest?.(".step");
    return found ? Number(found.dataset.step) : null;
  }

  point(step) {
    if (step === this.pointed) return;
    this.pointed = step;
    this.draw();
  }

  choose(step) {
    if (step === null) return;
    this.chosen = step === this.steps.at(-1)?.step ? null : step;
    this.draw();
  }

  key(event) {
    if (!event.target.closest(".steps") || !this.steps.length) return;
    const now = this.steps.indexOf(this.at(this.chosen)),
      end = this.steps.length - 1;
    const to = {ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: end, Escape: end}[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.pointed = null;
    this.choose(this.steps[Math.min(end, Math.max(0, to))].step);
  }

  at(number) {
    return this.steps.find(step => step.step === number) || this.steps.at(-1);
  }

  draw() {
    if (!this.steps.length) {
      patch(this.box, h("p", {class: "soft"}, "No step has ended yet."));
      return;
    }
    const longest = most(this.steps.map(step => step.seconds)) || 1;
    const shown = this.at(this.pointed ?? this.chosen),
      chosen = this.at(this.chosen);
    const seen = new Set(this.steps.flatMap(step => causes(step).map(([cause]) => cause)));
    patch(
      this.box,
      h(
        "p",
        {class: "soft"},
        `${plural(this.steps.length, "step")}${this.of ? ` of ${this.of}` : ""}, the longest ${seconds(longest)}. `,
        typeof this.rank.step_seconds === "number"
          ? `Their median is ${seconds(this.rank.step_seconds)}, and ${percent(this.rank.stall_share)} of their time ` +
              `was stall, without the first step of the run.`
          : "The median appears after the second step.",
      ),
      h(
        "div",
        {class: "steps-and-detail"},
        h(
          "div",
          {class: "axis", "aria-hidden": "true"},
          h("span", {}, seconds(longest)),
          h("span", {}, seconds(longest / 2)),
          h("span", {}, "0"),
        ),
        h(
          "div",
          {
            class: "steps",
            role: "listbox",
            tabindex: "0",
            "aria-orientation": "horizontal",
            "aria-label": "Recent steps, oldest first",
            "aria-activedescendant": `step-${chosen.step}`,
          },
          this.steps.map(step => bar(step, longest, step === chosen)),
        ),
        breakdown(shown, shown === this.steps.at(-1)),
      ),
      h(
        "ul",
        {class: "legend"},
        [...Object.keys(PHASES), "between phases"].map(name =>
          h("li", {}, h("i", {class: `swatch ${phaseClass(name)}`}), explained(name)),
        ),
        [...seen]
          .sort()
          .map(cause =>
            h("li", {key: cause}, h("i", {class: `swatch ${causeClass(cause)}`}), "stall: ", explained(cause)),
          ),
      ),
      h("p", {class: "soft keys"}, "Arrow keys move between steps, Escape goes to the last one."),
    );
  }
}
