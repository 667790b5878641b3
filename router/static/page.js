// The page: polls the router once a second, and says so when it does not respond.

import { NeedsKey, ask, askForKey } from "./ask.js";
import { byId, mark, show, write } from "./dom.js";
import { askForHour } from "./hour.js";
import { openIds } from "./insight.js";
import { showHeadline, showOnlyProblems, showReplicas, startReplicas } from "./replicas.js";
import { forgetRequests, startRequests, takeRequests } from "./requests.js";
import { offerModels, startRoute } from "./route.js";
import { showTotals } from "./totals.js";
import { elapsed, learnKinds, timeOfDay } from "./words.js";

const EVERY_MS = 1000;
const AT_ONCE = 200;

let startedAt = null; // of the router whose requests are shown
let change = 0; // the last one seen
let lastResponseAt = null; // Unix time of this machine

async function poll() {
  if (document.hidden) return;
  try {
    const [overview, log] = await Promise.all([
      ask("operator", "overview"),
      ask("operator", `requests?after=${change}&limit=${AT_ONCE}`),
    ]);
    await askForHour(openIds());
    if (overview.started_at === log.started_at) take(overview, log);
  } catch (error) {
    await miss(error);
  }
}

function take(overview, log) {
  lastResponseAt = Date.now() / 1000;
  document.body.classList.remove("stale");
  say("good", "live");
  if (startedAt !== overview.started_at) {
    // Another process counts its changes from 0; this poll may have asked for those after the old
    // process's last one.
    const isFirst = startedAt === null;
    startedAt = overview.started_at;
    change = 0;
    forgetRequests();
    if (!isFirst) return;
  }
  change = log.change;
  showOverview(overview);
  takeRequests(log.requests, log.requests.length === AT_ONCE);
}

function showOverview(overview) {
  learnKinds(overview.kinds);
  write(byId("about"), `policy ${overview.policy} · up ${overview.uptime}`);
  showTotals(overview);
  showReplicas(overview);
  const wrong = showHeadline(overview);
  document.title = wrong ? `(${wrong}) kvroute` : "kvroute";
  offerModels(overview.models);
}

async function miss(error) {
  document.body.classList.add("stale");
  if (error instanceof NeedsKey) {
    say("bad", "locked");
    if (byId("give-key").hidden && (await askForKey("operator"))) return;
    show(byId("give-key"), true);
    return;
  }
  say("bad", lastResponseAt === null ? "not connected" : sinceWhen());
  document.title = "(!) kvroute";
}

function sinceWhen() {
  const seconds = Date.now() / 1000 - lastResponseAt;
  return `not connected since ${timeOfDay(lastResponseAt)} (${elapsed(seconds)})`;
}

function say(level, text) {
  write(byId("connection"), text);
  mark(byId("connection"), "level", level);
  if (level === "good") show(byId("give-key"), false);
}

// Each poll waits for the response to the one before, so requests to a slow router do not pile up.
async function pollForever() {
  for (;;) {
    await poll();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

byId("give-key").addEventListener("click", () => askForKey("operator"));
byId("headline").addEventListener("click", () => {
  showOnlyProblems();
  byId("replicas").scrollIntoView({ behavior: "smooth" });
});
startReplicas();
startRequests();
startRoute();
pollForever();
