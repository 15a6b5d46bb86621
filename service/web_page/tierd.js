// The main module: the shown run, and the state of the web page between two events.

import {charts, curveOf, curves, Series} from "./charts.js";
import {link, lost, nodes, only, picks, where} from "./chrome.js";
import {ended} from "./ended.js";
import {follow, get, token, TokenRequired} from "./follow.js";
import {overview} from "./overview.js";
import {h, patch} from "./patch.js";
import * as moving from "./paths.js";
import {ranks as rankTable} from "./ranks.js";
import * as summary from "./run.js";
import {Settings} from "./settings.js";
import {Steps} from "./steps.js";
import * as tiers from "./tiers.js";
import * as totals from "./totals.js";
import {words} from "./words.js";

const MOST_WARNINGS = 4;
const NOTED = 2000; // ms: the sidecar checks once a second which runs have ended
const PLAN_EVERY = 10; // seconds: peaks, medians and curves change slowly

const at = id => document.getElementById(id);
const state = {
  status: null, // the last status received
  run: null, // the shown run as last received; it stays after its status files are removed
  there: null, // the runs that have status files
  series: new Series(),
  plan: [], // the ranks of this run in /v1/plan
  planAt: 0,
};
const [bandwidth, stall] = charts();
const training = curves(at("curves"));
const steps = new Steps(at("steps"));
const settings = new Settings(() => askForToken());
let connection = null;

const picked = () => {
  const given = new URLSearchParams(location.hash.slice(1));
  return {run: given.get("run"), rank: given.has("rank") ? Number(given.get("rank")) : null};
};

function pick(run, rank) {
  const chosen = new URLSearchParams({run});
  if (rank !== null) chosen.set("rank", rank);
  history.replaceState(null, "", `#${chosen}`);
  show();
}

/** The requested run; else the shown run while it exists; else the latest run that trains. */
function choose(runs) {
  const byId = id => runs.find(run => run.id === id);
  const requested = byId(picked().run);
  if (requested) return requested;
  const same = state.run && byId(state.run.id);
  if (same && same.state !== "ended") return same;
  const latest = [...runs].sort((a, b) => (b.started_at || 0) - (a.started_at || 0));
  return latest.find(run => run.state !== "ended") || same || latest[0] || null;
}

function receive(status) {
  totals.pace(status, state.status);
  state.status = status;
  const there = status.runs.map(run => run.id).join(" ");
  if (there !== state.there) setTimeout(recall, state.there === null ? 0 : NOTED);
  state.there = there;
  nodes(status.nodes);
  link(status.runs.some(run => run.state !== "ended") ? "live" : "idle");
  show();
}

function show() {
  const {runs, taken_at: now} = state.status;
  const chosen = choose(runs);
  const before = state.run;
  if (chosen) state.run = chosen;
  else if (state.run) state.run = {...state.run, state: "ended", warnings: []};
  only(state.run ? "shown" : "nothing");
  if (!state.run) {
    document.title = "tierd";
    return where(state.status);
  }
  if (before?.id !== state.run.id) fresh();
  else if (chosen) state.series.add(chosen.latest);
  const news = summary.news(before, state.run, now);
  if (news) at("news").textContent = news;
  draw(now);
}

/** Switches to another run and drops the data of the previous one. */
function fresh() {
  state.series = new Series();
  state.plan = [];
  trained();
  remember();
}

/** Fills the charts from /v1/history; they keep their content if the request fails. */
async function remember() {
  const run = state.run.id;
  state.planAt = 0;
  const history = await ask(`/v1/history?run=${encodeURIComponent(run)}`);
  if (!history || state.run.id !== run) return;
  state.series.fill(history.runs[0]);
  draw(state.status.taken_at);
}

/** Fetches the ended runs; they change only when the runs in `there` change. */
async function recall() {
  const runs = await ask("/v1/runs");
  if (!runs) return;
  at("ended").hidden = !runs.ended.length;
  patch(at("ended-runs"), ended(runs.ended));
  patch(at("nothing-title"), runs.ended.length ? "No run now" : "No run yet");
}

async function replan(now) {
  if (now - state.planAt < PLAN_EVERY) return;
  state.planAt = now;
  const run = state.run.id;
  const [plans, curve] = await Promise.all(
    ["plan", "curve"].map(noun => ask(`/v1/${noun}?run=${encodeURIComponent(run)}`)),
  );
  if (state.run.id !== run) return;
  if (plans) state.plan = plans.runs[0]?.ranks || [];
  plan();
  if (curve) trained(curve.runs[0]?.ranks[0]);
}

/** The JSON at `address`; null if the request fails, which the events also report. */
async function ask(address) {
  try {
    return await get(address);
  } catch (error) {
    if (error instanceof TokenRequired) askForToken();
    return null;
  }
}

const scope = () => {
  const {rank} = picked();
  return state.run.ranks.some(entry => entry.rank === rank) ? rank : null;
};
const inScope = ranks => (scope() === null ? ranks : ranks.filter(entry => entry.rank === scope()));

/** Draws the curves of `rank` in /v1/curve, if it has two points; a chart without values is hidden. */
function trained(rank) {
  at("training").hidden = !rank || rank.curve.step.length < 2;
  if (at("training").hidden) return;
  const data = curveOf(rank);
  for (const chart of training) {
    chart.figure.hidden = !chart.series.some(line => data.values[line.name].some(value => value !== null));
    if (!chart.figure.hidden) chart.show(data);
  }
}

const place = () => (state.status.nodes.length ? "on all nodes" : "on this node");

function plan() {
  const ranks = inScope(state.plan);
  patch(at("plan"), tiers.plan(totals.compared(ranks), tiers.planned(ranks)));
}

function draw(now) {
  const {run} = state;
  const ranks = inScope(run.ranks.filter(rank => rank.pid !== null));
  document.title =
    run.state === "training"
      ? `${run.name} · step ${run.step ?? 0} · tierd`
      : `${run.name} ${run.state} · tierd`;
  picks(state.status.runs, run, scope());
  patch(at("name"), run.name);
  patch(at("state"), summary.runState(run));
  patch(at("about"), summary.about(run, place()));
  const links = summary.links(run);
  at("links").hidden = !links.length;
  patch(at("links"), links);
  at("overview").hidden = state.status.runs.length < 2;
  patch(at("runs"), overview(state.status.runs, run.id, now));
  const requested = picked().run;
  at("elsewhere").hidden = requested === null || requested === run.id;
  patch(
    at("elsewhere"),
    "The run of this link, ",
    h("code", {}, requested ?? ""),
    `, has no status file ${place()}; this is another run.`,
  );
  patch(at("facts"), summary.facts(run, ranks, now));
  warn();
  patch(at("tiers"), tiers.tiers(totals.tiers(ranks, run.device), ranks));
  patch(at("paths"), moving.paths(totals.paths(ranks), ranks));
  const copied = totals.link(ranks);
  at("device-link").hidden = !copied;
  patch(at("copies"), moving.copies(copied));
  patch(at("ranks"), rankTable(run, place()));
  const sent = totals.collectives(ranks);
  at("network").hidden = !sent.length;
  patch(at("collectives"), sent.length ? moving.collectives(sent) : null);
  patch(at("outcome"), run.configuration || "This run does not publish its configuration.");
  patch(at("versions"), summary.versions(run));
  steps.show(ranks, scope());
  settings.show(run);
  // The same figures as in the tables.
  bandwidth.show(state.series, run.state === "ended" ? {} : totals.now(run.ranks));
  stall.show(state.series);
  plan();
  replan(now);
}

/** Shows the first warnings, errors first, and folds the others, so the figures stay on the screen. */
function warn() {
  const {run} = state;
  const [first, rest] = at("warnings").querySelectorAll("ul"),
    more = rest.closest("details");
  const shown = run.warnings.length > MOST_WARNINGS ? MOST_WARNINGS - 1 : MOST_WARNINGS;
  at("warnings").hidden = !run.warnings.length;
  patch(first, summary.warnings(run, 0, shown));
  more.hidden = run.warnings.length <= shown;
  patch(more.querySelector("summary"), `${run.warnings.length - shown} more`);
  patch(rest, summary.warnings(run, shown));
}

function askForToken() {
  connection?.stop();
  connection = null;
  at("token-refused").textContent = token.get() ? "The sidecar refused this token." : "";
  token.drop();
  link("connecting");
  only("token");
  programs();
  at("token-text").focus();
}

function connect() {
  connection?.stop();
  connection = follow({
    status: receive,
    lost: (reason, delay) => lost(reason, delay, state.status),
    tokenRequired: askForToken,
  });
  programs();
}

/** Hides the links to the API if a token is required, because links cannot send it. */
function programs() {
  at("programs").hidden = token.get() !== null || !at("token").hidden;
}

document.addEventListener("themed", () => {
  for (const chart of [bandwidth, stall, ...training]) if (chart.plot) chart.restart();
});
at("run").addEventListener("change", event => pick(event.target.value, null));
at("rank").addEventListener("change", event =>
  pick(state.run.id, event.target.value === "" ? null : Number(event.target.value)),
);
at("retry").addEventListener("click", () => connection?.again());
at("token-form").addEventListener("submit", event => {
  event.preventDefault();
  const given = at("token-text").value.trim();
  at("token-text").value = "";
  // Fetch rejects other characters in a header with the same error as a failed connection.
  if (!/^[\x21-\x7e]+$/.test(given)) {
    at("token-refused").textContent = "This token has invalid characters: copy it again.";
    return;
  }
  token.keep(given);
  only(state.run ? "shown" : "waiting");
  connect();
});
patch(at("words"), h("summary", {}, "Words on this page"), words());
addEventListener("hashchange", () => state.status && show());
// A hidden tab needs no events: disconnect to save the sidecar's CPU time.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) {
    if (state.run) remember();
    connect();
  } else if (connection) {
    connection.stop();
    connection = null;
  }
});
connect();
