// The line of totals: the last minute, and how many replicas and streams are well.

import { byId, mark, write } from "./dom.js";
import { count, plural, rate, share } from "./words.js";

function total(id, figure, detail, level = "") {
  const card = byId(id);
  write(card.querySelector(".figure"), figure);
  write(card.querySelector(".detail"), detail);
  mark(card, "level", level);
}

export function showTotals(overview) {
  showReplicas(overview.replicas);
  showFeeds(overview.replicas.flatMap((replica) => replica.sources));
  showTraffic(overview.minute, overview.under_way);
}

function showReplicas(replicas) {
  const states = tally(replicas.map((replica) => replica.state));
  const healthy = states.healthy ?? 0;
  const detail = wordsOf(states, ["unhealthy", "starting", "draining"]);
  const level = states.unhealthy || !healthy ? "bad" : detail ? "warn" : "good";
  total("total-replicas", `${count(healthy)} / ${count(replicas.length)}`, detail || "all of them", level);
}

function showFeeds(sources) {
  const states = tally(sources.map((source) => source.state ?? "unknown"));
  const live = states.live ?? 0;
  const detail = wordsOf(states, ["suspect", "dead", "recovering", "connecting", "unknown"]);
  const level = states.suspect || states.dead ? "bad" : detail ? "warn" : sources.length ? "good" : "";
  total("total-feeds", `${count(live)} / ${count(sources.length)}`, detail || (sources.length ? "all of them" : "none known"), level);
}

function showTraffic(minute, underWay) {
  const since = minute.seconds < 59 ? `the last ${Math.round(minute.seconds)} s` : "the last minute";
  total("total-rate", rate(minute.requests / minute.seconds), `${count(underWay)} under way · ${since}`);
  showHits(minute);
  const wrong = minute.over + minute.under;
  const split = wrong ? `${count(minute.over)} promised too much, ${count(minute.under)} too little` : "every prediction exact";
  total("total-wrong", minute.compared ? share(wrong, minute.compared) : "–", minute.compared ? split : "no answer tells", !minute.compared ? "" : wrong > minute.compared / 100 ? "bad" : wrong ? "warn" : "good");
  total("total-failed", count(minute.failed), minute.failed ? `of ${plural(minute.requests, "request")}` : "in the last minute", minute.failed ? "bad" : "good");
}

// What engines report is the truth; what was predicted stands in where they report nothing.
function showHits(minute) {
  if (minute.compared_tokens) {
    const predicted = `predicted ${share(minute.predicted_tokens, minute.compared_tokens)}`;
    total("total-hits", share(minute.actual_tokens, minute.compared_tokens), `${predicted} · ${plural(minute.compared, "answer")}`);
  } else if (minute.routed_tokens) {
    total("total-hits", share(minute.promised_tokens, minute.routed_tokens), "predicted; no engine reports it");
  } else {
    total("total-hits", "–", "no prompt in the last minute");
  }
}

function tally(words) {
  const counts = {};
  for (const word of words) counts[word] = (counts[word] ?? 0) + 1;
  return counts;
}

const wordsOf = (counts, words) => words.filter((word) => counts[word]).map((word) => `${count(counts[word])} ${word}`).join(" · ");
