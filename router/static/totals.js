// The line of totals: the last minute, and how many replicas and event streams are well.

import { byId, mark, write } from "./dom.js";
import { count, plural, rate, shortCount } from "./words.js";

const MANY_MISPREDICTED = 0.01;

function total(id, figure, detail, level = "") {
  const card = byId(id);
  write(card.querySelector(".figure"), figure);
  write(card.querySelector(".detail"), detail);
  mark(card, "level", level);
}

export function showTotals(overview) {
  showReplicas(overview.replicas);
  showStreams(overview.replicas.flatMap((replica) => replica.sources));
  showTraffic(overview.minute, overview.under_way);
  showHits(overview.minute, overview.hint_tokens);
  showMispredicted(overview.minute);
  showFailed(overview.minute);
}

function showReplicas(replicas) {
  const states = tally(replicas.map((replica) => replica.state));
  const healthy = states.healthy ?? 0;
  const others = listed(states, ["unhealthy", "starting", "draining"]);
  const level = states.unhealthy ? "bad" : others ? "warn" : "good";
  if (!replicas.length) {
    total("total-replicas", "0", "none yet");
    return;
  }
  const figure = `${count(healthy)} / ${count(replicas.length)}`;
  total("total-replicas", figure, others || "all of them", level);
}

function showStreams(sources) {
  const states = tally(sources.map((source) => source.state ?? "unknown"));
  const others = listed(states, ["suspect", "dead", "recovering", "connecting", "unknown"]);
  if (!sources.length) {
    total("total-feeds", "0", "none known");
    return;
  }
  const figure = `${count(states.live ?? 0)} / ${count(sources.length)}`;
  const detail = others || "all of them";
  const isBad = states.suspect || states.dead;
  const level = isBad ? "bad" : others ? "warn" : "good";
  total("total-feeds", figure, detail, level);
}

function showTraffic(minute, underWay) {
  const isWhole = minute.seconds >= 59;
  const since = isWhole ? "the last minute" : `the last ${Math.round(minute.seconds)} s`;
  const figure = rate(minute.requests / minute.seconds);
  total("total-rate", figure, `${count(underWay)} under way · ${since}`);
}

// The hits that engines reported; the predicted ones where none did.
function showHits(minute, hintTokens) {
  if (minute.cached_share !== null) {
    const responses = plural(minute.compared, "response");
    // Hits that end where a replica was told to keep a boundary, since the start.
    const hints = hintTokens ? ` · ${shortCount(hintTokens)} tokens by hints so far` : "";
    const detail = `predicted ${minute.predicted_share} · ${responses}${hints}`;
    total("total-hits", minute.cached_share, detail);
  } else if (minute.promised_share !== null) {
    total("total-hits", minute.promised_share, "predicted; no engine reports it");
  } else {
    total("total-hits", "–", "no prompt in the last minute");
  }
}

function showMispredicted(minute) {
  if (minute.mispredicted_share === null) {
    total("total-wrong", "–", "no engine reports cached tokens");
    return;
  }
  const wrong = minute.over + minute.under;
  const level = wrong > MANY_MISPREDICTED * minute.compared ? "bad" : wrong ? "warn" : "good";
  const split = `${count(minute.over)} promised too much, ${count(minute.under)} too little`;
  const detail = wrong ? split : "every prediction exact";
  total("total-wrong", minute.mispredicted_share, detail, level);
}

function showFailed(minute) {
  const all = `of ${plural(minute.requests, "request")}`;
  const detail = minute.failed ? all : "in the last minute";
  total("total-failed", count(minute.failed), detail, minute.failed ? "bad" : "good");
}

function tally(words) {
  const counts = {};
  for (const word of words) counts[word] = (counts[word] ?? 0) + 1;
  return counts;
}

function listed(counts, words) {
  const found = words.filter((word) => counts[word]);
  return found.map((word) => `${count(counts[word])} ${word}`).join(" · ");
}
