// Sums over several ranks. Pure functions.

import {most, sum} from "./figures.js";

const merged = maps => {
  const totals = {};
  for (const map of maps)
    for (const [key, value] of Object.entries(map || {})) totals[key] = (totals[key] || 0) + value;
  return totals;
};

function grouped(lists, key) {
  const groups = new Map();
  for (const item of lists.flat()) groups.set(item[key], [...(groups.get(item[key]) || []), item]);
  return [...groups.values()];
}

/** Tiers of all `ranks`: budgets and bytes are summed; host memory and disks count once per node, GPUs per rank. */
export function tiers(ranks, device) {
  return grouped(
    ranks.map(({node, tiers}) => tiers.map(tier => ({...tier, node}))),
    "name",
  ).map(same => {
    const nodes = grouped([same], "node");
    const total = name => sum(same.map(tier => tier[name]));
    const each = same[0].name === "device" && String(device || "").startsWith("cuda");
    const machine = name => {
      const parts = each ? same.map(tier => tier[name]) : nodes.map(here => most(here.map(tier => tier[name])));
      return parts.some(part => typeof part === "number") ? sum(parts) : null;
    };
    return {
      name: same[0].name,
      budget: total("budget"),
      used: total("used"),
      peak: total("peak"),
      by_kind: merged(same.map(tier => tier.by_kind)),
      capacity: machine("capacity"),
      available: machine("available"),
      machines: nodes.length,
    };
  });
}

const LASTING = ["bytes", "retries", "errors", "average_bytes_per_second", "peak_bytes_per_second"];
const MOMENTARY = ["in_flight", "bytes_per_second"]; // only of live ranks

/** Swap paths of all `ranks`: counters and rates are summed; a latency is the maximum. */
export function paths(ranks) {
  const added = (names, all) => Object.fromEntries(names.map(name => [name, sum(all.map(entry => entry[name]))]));
  const direction = (all, live) => ({
    ...added(LASTING, all),
    ...added(
      MOMENTARY,
      all.filter((_, place) => live[place]),
    ),
    errors_by_errno: merged(all.map(entry => entry.errors_by_errno)),
    p50: most(all.map(entry => entry.latency?.p50)),
    p99: most(all.map(entry => entry.latency?.p99)),
  });
  const paths = ranks.map(rank => rank.io.map(path => ({...path, live: rank.state === "live"})));
  return grouped(paths, "path").map(same => ({
    path: same[0].path,
    engine: same[0].engine,
    direct: same.every(entry => entry.direct),
    queue_full_seconds: most(same.map(entry => entry.queue_full_seconds)),
    measured: sum(same.map(entry => entry.measured_bytes_per_second)),
    worn: most(same.map(entry => entry.drive?.used)),
    read: direction(
      same.map(entry => entry.read),
      same.map(entry => entry.live),
    ),
    written: direction(
      same.map(entry => entry.written),
      same.map(entry => entry.live),
    ),
  }));
}

/** Sums over the links of the devices, by direction; null if no rank has a link. */
export function link(ranks) {
  const linked = ranks.filter(rank => rank.link);
  if (!linked.length) return null;
  const direction = way => {
    const total = (name, of = linked) => sum(of.map(rank => rank.link[way][name]));
    return {
      rate: total(
        "bytes_per_second",
        linked.filter(rank => rank.state === "live"),
      ),
      average: total("average_bytes_per_second"),
      peak: total("peak_bytes_per_second"),
      bytes: total("bytes"),
      copies: total("copies"),
    };
  };
  const measured = sum(linked.map(rank => rank.link.measured_bytes_per_second));
  return {h2d: direction("h2d"), d2h: direction("d2h"), measured};
}

export function collectives(ranks) {
  return grouped(
    ranks.map(rank => rank.collectives),
    "kind",
  ).map(same => ({
    kind: same[0].kind,
    calls: most(same.map(entry => entry.calls)),
    sent: sum(same.map(entry => entry.sent_bytes)),
    rate: sum(same.map(entry => entry.sent_bytes_per_second)),
  }));
}

/** Planned and measured values, from the ranks in /v1/plan. */
export function compared(ranks) {
  return grouped(
    ranks.map(rank => rank.compared),
    "name",
  ).map(same => ({
    ...same[0],
    planned: sum(same.map(entry => entry.planned)),
    found: same.some(entry => entry.found === null) ? null : sum(same.map(entry => entry.found)),
  }));
}

/** The rank whose recent steps take longest. */
export function slowest(ranks) {
  const stepping = ranks.filter(rank => rank.steps.length);
  return stepping.sort((a, b) => (b.step_seconds ?? 0) - (a.step_seconds ?? 0))[0] || null;
}

/** Bytes per second of all `ranks` over their recent steps, without the first of the run; null before there are any. */
export function overSteps(ranks, name) {
  const rates = ranks.flatMap(rank => {
    const steady = rank.steps.filter(step => step.step > 1);
    const took = sum(steady.map(step => step.seconds));
    return took ? [sum(steady.map(step => step[name])) / took] : [];
  });
  return rates.length ? sum(rates) : null;
}

/** Bytes per second that a rank moves in one direction. */
export const moving = (rank, way) => sum(rank.io.map(path => path[way].bytes_per_second));

/** The rates of all live `ranks` at this moment, by the names of the chart. */
export function now(ranks) {
  const live = ranks.filter(rank => rank.state === "live");
  if (!live.length) return {};
  const copied = link(live);
  return {
    read: sum(live.map(rank => moving(rank, "read"))),
    written: sum(live.map(rank => moving(rank, "written"))),
    h2d: copied?.h2d.rate,
    d2h: copied?.d2h.rate,
    sent: sum(collectives(live).map(entry => entry.rate)),
  };
}

/**
 * Replaces the bandwidths in `status` by means since `before`, from the counters. Ranks publish rates over a quarter of
 * a second, which change too fast to read: a step alternates between reading and computing.
 */
export function pace(status, before) {
  const runs = new Map((before?.runs || []).map(run => [run.id, run]));
  for (const run of status.runs)
    for (const rank of run.ranks) {
      const then = runs.get(run.id)?.ranks.find(entry => entry.rank === rank.rank && entry.pid === rank.pid);
      // Counters are of the moment at which the rank published them.
      const took = then ? status.taken_at - rank.heartbeat_age - (before.taken_at - then.heartbeat_age) : 0;
      if (took < 0.5 || took > 30) continue;
      for (const path of rank.io)
        for (const way of ["read", "written"]) {
          const moved = path[way].bytes - then.io.find(entry => entry.path === path.path)?.[way].bytes;
          if (moved >= 0) path[way].bytes_per_second = moved / took;
        }
      for (const way of rank.link && then.link ? ["h2d", "d2h"] : []) {
        const copied = rank.link[way].bytes - then.link[way].bytes;
        if (copied >= 0) rank.link[way].bytes_per_second = copied / took;
      }
      for (const collective of rank.collectives) {
        const sent = collective.sent_bytes - then.collectives.find(other => other.kind === collective.kind)?.sent_bytes;
        if (sent >= 0) collective.sent_bytes_per_second = sent / took;
      }
    }
}
