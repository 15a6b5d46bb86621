// Tiers as bars, and the plan as a table. Pure: figures in, element descriptions out.

import {bytes, count, moved, percent, plural, sum, UNKNOWN} from "./figures.js";
import {h, table} from "./patch.js";
import {explained} from "./words.js";

const KINDS = [
  "parameters",
  "gradients",
  "optimizer state",
  "activations",
  "unsharded groups",
  "staging",
  "local gradients",
  "gradient reduction",
  "checkpoint",
  "idle windows",
];

const kindClass = kind => (KINDS.includes(kind) ? `kind-${kind.replaceAll(" ", "-")}` : "kind-other");

function tierBar(tier) {
  const place = kind => (KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length);
  const used = Object.entries(tier.by_kind)
    .filter(([, size]) => size > 0)
    .sort(([a], [b]) => place(a) - place(b) || (a < b ? -1 : 1));
  const rest = tier.used - sum(used.map(([, size]) => size));
  if (rest > 0) used.push(["other", rest]);
  // The budget is at nine tenths of the bar, so an excess is visible.
  const scale = Math.max(tier.budget / 0.9, tier.used, tier.peak, 1);
  const share = value => `${(100 * value) / scale}%`;
  const ofBudget = value => (tier.budget ? percent(value / tier.budget) : UNKNOWN);
  const over = tier.budget && tier.used > tier.budget;
  return h(
    "div",
    {key: tier.name, class: "tier", role: "group", "aria-label": `Tier ${tier.name}`},
    h(
      "div",
      {class: "tier-head"},
      h("h3", {}, explained(tier.name === "nvme" ? "NVMe" : tier.name)),
      h(
        "span",
        {class: over ? "bad" : ""},
        h("b", {}, bytes(tier.used)),
        ` of ${bytes(tier.budget)} `,
        explained("budget"),
        ` · ${ofBudget(tier.used)}`,
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
      tier.budget ? h("i", {class: "beyond", style: {left: share(tier.budget)}}) : null,
      tier.budget
        ? h("i", {class: "budget", style: {left: share(tier.budget)}, title: `budget ${bytes(tier.budget)}`})
        : null,
      tier.peak
        ? h("i", {class: "peak", style: {left: share(tier.peak)}, title: `peak ${bytes(tier.peak)}`})
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
          explained(kind),
          " ",
          h("b", {}, bytes(size)),
        ),
      ),
    ),
    h(
      "p",
      {class: "soft"},
      h("i", {class: "peak-sign"}),
      explained("peak"),
      ` ${bytes(tier.peak)}, ${ofBudget(tier.peak)} of budget`,
      tier.capacity ? ` · ${tier.machines > 1 ? `${tier.machines} machines have` : "machine has"} ${bytes(tier.capacity)}` : "",
      typeof tier.available === "number" ? ` · ${bytes(tier.available)} free now` : "",
    ),
  );
}

export function tiers(all, ranks) {
  const used = all.filter(entry => entry.budget || entry.used || entry.peak);
  const idle = all.filter(entry => !used.includes(entry)).map(entry => (entry.name === "nvme" ? "NVMe" : entry.name));
  const activations = ranks.map(rank => rank.activations).filter(Boolean);
  const torch = ranks.map(rank => rank.device_memory).filter(Boolean);
  const total = (list, name) => bytes(sum(list.map(entry => entry[name])));
  const moves = sum(activations.map(entry => entry.moved || 0)) > 0;
  return [
    used.map(tierBar),
    idle.length ? h("p", {class: "soft", key: "idle"}, `Not used: ${idle.join(", ")}.`) : null,
    activations.length
      ? h(
          "p",
          {class: "soft", key: "beside"},
          `In addition, activations ${moves ? "that stay on the device " : ""}take ${total(activations, "used")}, ` +
            `peak ${total(activations, "peak")}.`,
          moves
            ? ` Since the start, ${total(activations, "moved")} of activations have left the device; ` +
                `${total(activations, "written")} were written to NVMe, and ${total(activations, "read")} read.`
            : "",
        )
      : null,
    torch.length
      ? h(
          "p",
          {class: "soft", key: "torch"},
          `torch has ${total(torch, "allocated")} of GPU memory in tensors, peak ${total(torch, "peak")}, and `,
          `${total(torch, "reserved")} reserved from the driver.`,
        )
      : null,
    !used.length && !activations.length ? h("p", {class: "soft", key: "none"}, "No rank publishes its tiers.") : null,
  ];
}

function verdict(planned, found) {
  if (typeof found !== "number") return ["no value yet", ""];
  if (!planned) return found ? ["not planned", "poor"] : ["as planned", "good"];
  const off = found / planned - 1;
  if (Math.abs(off) < 0.02) return ["as planned", "good"];
  if (off >= 1) return [`${(found / planned).toFixed(1)} times as much`, "poor"];
  return off > 0 ? [`${percent(off)} more`, off > 0.05 ? "poor" : "good"] : [`${percent(-off)} less`, "note"];
}

export function plan(rows, details) {
  if (!rows.length) return h("p", {class: "soft"}, "No rank publishes its plan.");
  const body = rows.map(({name, unit, planned, found}) => {
    const format = unit === "bytes" ? bytes : moved;
    const [word, shape] = verdict(planned, found);
    const scale = Math.max(planned / 0.75, found || 0, 1);
    return h(
      "tr",
      {key: name},
      h("th", {scope: "row"}, name.replace(/^nvme/, "NVMe")),
      h("td", {}, format(planned)),
      h("td", {}, format(found)),
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
    table("Plan against reality", "", ["quantity", "planned", "measured", "difference"], body),
    h(
      "p",
      {class: "soft", key: "details"},
      "The peak of each tier, and the bytes that a step moves (median of the recent steps).",
      rows.some(({unit, planned, found}) => unit !== "bytes" && typeof found === "number" && found < 0.98 * planned)
        ? " A step moves less than planned if groups stay unsharded until their next use: these are neither read nor" +
            " gathered again."
        : "",
      details ? ` ${details}` : "",
    ),
  ];
}

/** The plan in one sentence. */
export function planned(ranks) {
  const plan = ranks[0]?.plan;
  if (!plan) return "";
  const words = [
    plan.parameters ? `${count(plan.parameters)} parameters in ${plural(plan.groups, "group")}` : null,
    plan.micro_batches > 1 ? `${count(plan.micro_batches)} micro-batches a step` : null,
    plan.state_format ? `state ${plan.state_format}` : null,
  ]
    .filter(Boolean)
    .join(", ");
  return words && `${words}.`;
}
