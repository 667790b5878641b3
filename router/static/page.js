// The page: asks the router once a second, and says so when nobody answers.

import { NeedsKey, ask, askForKey } from "./ask.js";
import { byId, mark, show, write } from "./dom.js";
import { showOnlyProblems, showReplicas, showTrouble, startReplicas } from "./replicas.js";
import { forgetRequests, startRequests, takeRequests } from "./requests.js";
import { offerModels, startRoute } from "./route.js";
import { showTotals } from "./totals.js";
import { duration, timeOfDay } from "./words.js";

const EVERY_MS = 1000;
const AT_ONCE = 200;

let startedAt = null; // of the router whose requests are shown
let change = 0; // the last one seen
let lastAnswerAt = null; // Unix time here

async function poll() {
  if (document.hidden) return;
  try {
    const [overview, journal] = await Promise.all([ask("operator", "overview"), ask("operator", `requests?after=${change}&limit=${AT_ONCE}`)]);
    if (overview.started_at === journal.started_at) take(overview, journal);
  } catch (error) {
    await miss(error);
  }
}

function take(overview, journal) {
  lastAnswerAt = Date.now() / 1000;
  document.body.classList.remove("stale");
  say("good", "live");
  if (startedAt !== overview.started_at) {
    // Another process: its numbers begin anew, and this answer may have been asked with the old one's.
    const isFirst = startedAt === null;
    startedAt = overview.started_at;
    change = 0;
    forgetRequests();
    if (!isFirst) return;
  }
  change = journal.change;
  showOverview(overview);
  takeRequests(journal.requests, journal.requests.length === AT_ONCE);
}

function showOverview(overview) {
  write(byId("about"), `policy ${overview.policy} · up ${duration(overview.now - overview.started_at)}`);
  showTotals(overview);
  const wrong = showTrouble(showReplicas(overview));
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
  say("bad", lastAnswerAt === null ? "not connected" : `not connected since ${timeOfDay(lastAnswerAt)} (${duration(Date.now() / 1000 - lastAnswerAt)})`);
  document.title = "(!) kvroute";
}

function say(level, text) {
  write(byId("connection"), text);
  mark(byId("connection"), "level", level);
  if (level === "good") show(byId("give-key"), false);
}

// The next question is asked when this one is answered, so a slow router is not asked more and more.
async function pollForever() {
  for (;;) {
    await poll();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

byId("give-key").addEventListener("click", () => askForKey("operator"));
byId("trouble").addEventListener("click", () => {
  showOnlyProblems();
  byId("replicas").scrollIntoView({ behavior: "smooth" });
});
startReplicas();
startRequests();
startRoute();
pollForever();
