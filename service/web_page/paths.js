// Transfers as tables: swap paths, the device link and collectives. Pure: figures in, element descriptions out.

import {bytes, count, moved, percent, rate, seconds} from "./figures.js";
import {h, table} from "./patch.js";
import {explained} from "./words.js";

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
      moved(way.bytes),
      count(way.retries),
      errors(way),
    ].map(cell => h("td", {}, cell)),
  );
}

export function paths(all, ranks) {
  if (!all.length) return h("p", {class: "soft"}, "Nothing is swapped to NVMe.");
  const engine = ranks.map(rank => rank.io_engine).find(Boolean);
  const bodies = all.map(path => [
    h(
      "tr",
      {},
      h(
        "th",
        {scope: "rowgroup", colspan: "10", class: "path"},
        h(
          "div",
          {},
          h("code", {}, path.path),
          " ",
          h(
            "span",
            {class: "soft"},
            [
              path.engine,
              path.direct ? "direct" : "through the page cache",
              path.queue_full_seconds > 0 ? `queue full for ${seconds(path.queue_full_seconds)}` : null,
              path.measured ? `measured at ${rate(path.measured)}` : null,
              path.worn === null ? null : `${percent(path.worn)} of the drive's endurance used`,
            ]
              .filter(Boolean)
              .join(", "),
          ),
        ),
      ),
    ),
    direction("read", path.read),
    direction("written", path.written),
  ]);
  const flags = (engine?.flags || []).map(flag => flag.replaceAll("_", " "));
  const refused = Object.entries(engine?.passed_over || {}).map(
    ([what, why]) => `${what.replaceAll("_", " ")}: ${why}`,
  );
  return [
    table(
      "Swap paths",
      "paths",
      ["direction", "now", "while moving", "peak", "p50", "p99", "in flight", "total", "retries", "errors"].map(explained),
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
          refused.length ? ` Refused: ${refused.join("; ")}.` : "",
          " “While moving” is the average over the time with transfers in flight; the peak is the maximum of this average and of any quarter of a second.",
        )
      : null,
  ];
}

/** Both directions of the link; `both` is null if the CPU is the device. */
export function copies(both) {
  if (!both) return null;
  const rows = [
    ["to the device", both.h2d],
    ["from the device", both.d2h],
  ];
  return [
    table(
      "Device link",
      "",
      ["direction", "now", "while copying", "peak", "total", "copies"].map(explained),
      rows.map(([word, way]) =>
        h(
          "tr",
          {key: word},
          h("th", {scope: "row"}, word),
          [rate(way.rate), rate(way.average), rate(way.peak), moved(way.bytes), count(way.copies)].map(cell =>
            h("td", {}, cell),
          ),
        ),
      ),
    ),
    both.measured
      ? h("p", {class: "soft", key: "measured"}, `Measured before: ${rate(both.measured)} each way.`)
      : null,
  ];
}

export function collectives(all) {
  return table(
    "Collectives",
    "",
    ["collective", "now", "total sent", "calls"],
    all.map(collective =>
      h(
        "tr",
        {key: collective.kind},
        h("th", {scope: "row"}, explained(collective.kind)),
        h("td", {}, rate(collective.rate)),
        h("td", {}, moved(collective.sent)),
        h("td", {}, count(collective.calls)),
      ),
    ),
  );
}
