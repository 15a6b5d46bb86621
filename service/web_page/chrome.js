// The header around the figures of a run: the choice of run and rank, and the state of the connection.

import {clock, plural} from "./figures.js";
import {h, patch} from "./patch.js";

const at = id => document.getElementById(id);

/** Shows this part of the web page and hides the others. */
export function only(id) {
  for (const section of ["waiting", "token", "nothing", "shown"]) at(section).hidden = section !== id;
}

function options(select, choices, chosen) {
  patch(
    select,
    choices.map(([value, text]) => h("option", {key: value, value}, text)),
  );
  if (select.value !== chosen) select.value = chosen;
}

/** The runs to choose from, `run` among them, and its ranks; `rank` is the one chosen, or null. */
export function picks(there, run, rank) {
  const runs = there.some(candidate => candidate.id === run.id) ? there : [...there, run];
  const names = runs.map(candidate => candidate.name);
  at("pick-run").hidden = runs.length < 2;
  options(
    at("run"),
    runs.map(candidate => [
      candidate.id,
      names.filter(name => name === candidate.name).length > 1
        ? `${candidate.name}, ${clock(candidate.started_at)}`
        : candidate.name,
    ]),
    run.id,
  );
  at("pick-rank").hidden = run.ranks.length < 2;
  options(
    at("rank"),
    [
      ["", `all ${run.ranks.length}`],
      ...[...new Set(run.ranks.map(entry => entry.rank))].map(number => [String(number), String(number)]),
    ],
    rank === null ? "" : String(rank),
  );
  for (const element of document.querySelectorAll(".of-all")) element.hidden = rank === null;
}

const LINKS = {connecting: "connecting", live: "live", idle: "connected", lost: "no response"};

const say = text => {
  at("news").textContent = text;
};

/** The link is `now`: one of LINKS. */
export function link(now) {
  const shown = at("link");
  if (shown.dataset.link === "lost" && now !== "lost") say("The sidecar responds again");
  shown.dataset.link = now;
  shown.querySelector("span").textContent = LINKS[now];
  at("trouble").hidden = now !== "lost";
  at("main").classList.toggle("old", now === "lost");
}

/** No status comes, for `reason`; the next try is after `delay` ms (null: the sidecar tries). The last was `status`. */
export function lost(reason, delay, status) {
  if (at("link").dataset.link !== "lost") say(`The sidecar does not respond: ${reason}`);
  link("lost");
  const age = status ? ` The figures below are from ${clock(status.taken_at)}.` : "";
  at("retry").hidden = delay === null;
  patch(
    at("trouble").querySelector("p"),
    h("strong", {}, delay === null ? "The sidecar cannot read the run directory" : "The sidecar does not respond"),
    `: ${reason}.${age} Training is not affected.`,
    delay === null ? "" : ` Next attempt in ${plural(Math.round(delay / 1000), "second")}.`,
  );
}

const MOST_NODES = 4;

/** The nodes that do not answer, with the reasons. */
export function nodes(all) {
  const silent = all.filter(node => !node.answers);
  at("nodes").hidden = !silent.length;
  const more = silent.length - MOST_NODES;
  patch(
    at("nodes"),
    h(
      "p",
      {},
      h("strong", {}, `${silent.length} of ${plural(all.length, "node")} ${silent.length === 1 ? "does" : "do"} not answer`),
      `: ${silent.slice(0, MOST_NODES).map(node => `${node.address} (${node.problem})`).join("; ")}`,
      more > 0 ? ` and ${plural(more, "more node")}.` : ".",
      " Their ranks are shown as they were.",
    ),
  );
}

/** What the sidecar reads, for a reader who misses a run. */
export function where({directory, nodes}) {
  if (nodes.length) return patch(at("where"), "This sidecar reads the tierd of ", plural(nodes.length, "node"), ".");
  patch(
    at("where"),
    "This sidecar reads ",
    h("code", {}, directory),
    ". Runs with another ",
    h("code", {}, "TIERING_RUN_DIR"),
    " and runs of other users are not shown.",
  );
}
