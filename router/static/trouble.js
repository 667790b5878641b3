// What is wrong with a replica, in sentences; the worst first. Bad: it serves nothing, or its hits are not to be trusted.

import { count, duration, plural } from "./words.js";

const bad = (text) => ({ level: "bad", text });
const warn = (text) => ({ level: "warn", text });

const FEED_TROUBLE = {
  suspect: bad("events were lost for good: its hits are discounted"),
  dead: bad("its events are not followed any more"),
  connecting: warn("nobody publishes events at its address yet"),
  recovering: warn("events were lost and are being asked for again"),
};

export function problemsOf(replica) {
  const found = [...healthProblems(replica), ...feedProblems(replica), ...cacheProblems(replica)];
  return [...found.filter((each) => each.level === "bad"), ...found.filter((each) => each.level === "warn")];
}

export const levelOf = (problems) => problems[0]?.level ?? "good";

function* healthProblems(replica) {
  const since = duration(replica.seconds_in_health);
  if (replica.health === "unhealthy") yield bad(`unhealthy for ${since}${replica.last_error ? `: ${replica.last_error}` : ""}`);
  if (replica.health === "starting") yield warn(`no health check has passed yet, for ${since}${replica.last_error ? `: ${replica.last_error}` : ""}`);
  if (replica.state === "draining") yield warn("draining: gets no new requests");
  if (replica.health === "healthy" && !replica.serves) yield bad("has not said what it serves: gets no requests");
}

function* feedProblems(replica) {
  for (const [state, problem] of Object.entries(FEED_TROUBLE)) {
    const ranks = replica.sources.filter((source) => source.state === state).map((source) => source.dp_rank);
    if (ranks.length) yield { ...problem, text: problem.text + ofRanks(ranks, replica) };
  }
  if (replica.health === "healthy" && !replica.sources.length && !replica.sources_configured) {
    yield warn(["no event stream: it is routed by load", ...replica.notes].join("; "));
  }
}

function* cacheProblems(replica) {
  const incomplete = replica.sources.filter((source) => source.incomplete).map((source) => source.dp_rank);
  const unplaced = replica.sources.reduce((sum, source) => sum + source.unplaced, 0);
  if (incomplete.length) yield warn(`some of its blocks are not known${ofRanks(incomplete, replica)}`);
  if (unplaced) yield warn(`${plural(unplaced, "block")} that no prompt can find`);
  if (replica.tokenizer_disagreements) {
    yield bad(`tokenises ${count(replica.tokenizer_disagreements)} probes differently from the router: its hits are mispredicted`);
  }
}

function ofRanks(ranks, replica) {
  if (replica.sources.length < 2) return "";
  const shown = ranks.slice(0, 8).join(", ");
  return ` (rank ${shown}${ranks.length > 8 ? " and more" : ""})`;
}
