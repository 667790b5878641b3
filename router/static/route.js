// The prompt box: asks /route, and shows the response in words.

import { NeedsKey, Refused, ask, askForKey } from "./ask.js";
import { byId, element, mark, resize, show, widen, write, writeName } from "./dom.js";
import { count, kindLabel, plural, whyUnknown } from "./words.js";

const SHOWN = 8;
const TEXT_HINT = "Why is the sky blue?";
const BODY_HINT = '{"model": "...", "messages": [{"role": "user", "content": "..."}]}';

let route = null; // the last response
let isWhole = false;

export function startRoute() {
  byId("route-form").addEventListener("submit", (event) => {
    event.preventDefault();
    explain();
  });
  byId("route-kind").addEventListener("change", () => {
    const isBody = byId("route-kind").value === "body";
    byId("route-model").disabled = isBody;
    byId("route-prompt").placeholder = isBody ? BODY_HINT : TEXT_HINT;
  });
  byId("route-more").addEventListener("click", () => {
    isWhole = true;
    drawRanking();
  });
}

export function offerModels(models) {
  const list = byId("route-models");
  const options = resize(list, models.length, () => element("option"));
  models.forEach((model, index) => {
    if (options[index].value !== model) options[index].value = model;
  });
  const input = byId("route-model");
  if (models.length && !input.value && document.activeElement !== input) [input.value] = models;
}

async function explain() {
  const button = byId("route-ask");
  button.disabled = true;
  say("asking");
  try {
    route = await askWithKey(bodyOf());
    isWhole = false;
    draw();
    say("");
  } catch (error) {
    say(sentenceOf(error), "bad");
  } finally {
    button.disabled = false;
  }
}

async function askWithKey(body) {
  for (;;) {
    try {
      return await ask("client", "route?explain=true", body);
    } catch (error) {
      if (!(error instanceof NeedsKey) || !(await askForKey("client"))) throw error;
    }
  }
}

function bodyOf() {
  const text = byId("route-prompt").value;
  const model = byId("route-model").value;
  const kind = byId("route-kind").value;
  if (kind === "body") return text;
  if (kind === "prompt") return JSON.stringify({ model, prompt: text });
  return JSON.stringify({ model, messages: [{ role: "user", content: text }] });
}

function say(text, level = "") {
  write(byId("route-state"), text);
  mark(byId("route-state"), "level", level);
}

function sentenceOf(error) {
  if (error instanceof NeedsKey) return "this needs the router's client key";
  return error instanceof Refused ? error.message : "the router does not respond";
}

// --- the response --------------------------------------------------------------------------------

function draw() {
  show(byId("route-response"), true);
  write(byId("route-summary"), summary());
  const notes = [...promptNotes(), ...groupNotes(), ...excludedNotes()];
  const items = resize(byId("route-notes"), notes.length, () => element("li"));
  notes.forEach((note, index) => write(items[index], note));
  drawRanking();
}

function summary() {
  const [best] = route.ranking;
  const rank = best.dp_rank === null ? "" : `, rank ${best.dp_rank}`;
  return `It would go to ${best.replica}${rank}. ${hitSentence(best.hit)}`;
}

const offloadedTokens = (hit) => hit.cached_tokens - hit.gpu_cached_tokens;

function hitSentence(hit) {
  const all = route.prompt_tokens;
  if (!all) return "Nothing is known of the prompt, so only load decides.";
  if (!hit.cached_tokens) return `None of its ${plural(all, "token")} is cached there.`;
  const offloaded = offloadedTokens(hit);
  const where = offloaded ? `, ${count(offloaded)} of them in a lower tier` : " on the GPU";
  const are = hit.approximate ? "are estimated to be" : "are";
  const cached = `${count(hit.cached_tokens)} of its ${plural(all, "token")} ${are} cached there`;
  return `${cached}${where}; ${count(all - hit.cached_tokens)} would be computed.`;
}

function* promptNotes() {
  for (const prompt of route.prompts) {
    const { coverage, reason } = prompt;
    if (reason) yield `Not all of the prompt is known (${coverage}): ${whyUnknown(reason)}.`;
    if (prompt.lora_name) yield `It runs with the adapter ${prompt.lora_name}.`;
  }
}

// Why the hit is as long as it is: the longest prefix that every group accepts.
function* groupNotes() {
  const [best] = route.ranking;
  const groups = best.groups[0] ?? [];
  if (groups.length > 1) {
    const parts = groups.map(
      ({ group, kind, tokens }) => `${kindLabel(kind)} (group ${group}) ${count(tokens)}`,
    );
    yield (
      `By itself, each KV cache group would allow, in tokens on the GPU: ${parts.join(", ")}. ` +
      "The hit is the longest prefix that all of them accept."
    );
  }
  if (best.hit.suspect) {
    yield "Events of this replica were lost, so its hit is doubtful and counts in part.";
  }
  if (best.hit.approximate) {
    yield "No events tell what this replica holds: its hit is an estimate from what was sent there.";
  }
  const recent = best.recent_tokens;
  if (recent) yield `${plural(recent, "token")} of this prompt were sent there just now.`;
}

function* excludedNotes() {
  const reasons = {};
  for (const found of route.excluded) (reasons[found.reason] ??= []).push(found.replica);
  for (const [reason, ids] of Object.entries(reasons)) {
    const more = ids.length > 5 ? ` and ${count(ids.length - 5)} more` : "";
    yield `Left out, ${reason}: ${ids.slice(0, 5).join(", ")}${more}.`;
  }
}

function drawRanking() {
  const { ranking } = route;
  const shown = isWhole ? ranking : ranking.slice(0, SHOWN);
  const table = byId("route-table");
  show(table, ranking.length > 0);
  const rows = resize(table.tBodies[0], shown.length, makeRow);
  shown.forEach((ranked, index) => drawRanked(rows[index], ranked, index));
  show(byId("route-more"), shown.length < ranking.length);
  write(byId("route-more"), `Show all ${count(ranking.length)}`);
}

function makeRow() {
  const row = element("tr");
  row.append(...["place", "name", "number", "hit", "why"].map((name) => element("td", name)));
  const bar = element("span", "hit-bar");
  bar.append(element("i", "gpu"), element("i", "lower"));
  row.children[1].append(element("span"));
  row.children[3].append(bar, element("span", "hit-text"));
  return row;
}

function drawRanked(row, ranked, index) {
  const [place, name, wait, hit, why] = row.children;
  write(place, String(index + 1));
  const rank = ranked.dp_rank === null ? "" : ` rank ${ranked.dp_rank}`;
  writeName(name.firstChild, ranked.replica + rank);
  write(wait, count(ranked.cost));
  const all = route.prompt_tokens || 1;
  widen(hit.querySelector(".gpu"), ranked.hit.gpu_cached_tokens / all);
  widen(hit.querySelector(".lower"), offloadedTokens(ranked.hit) / all);
  write(hit.querySelector(".hit-text"), hitText(ranked));
  write(why, ranked.reason);
}

function hitText({ hit, groups: prompts }) {
  const groups = prompts[0] ?? [];
  const parts = groups.map((group) => `${kindLabel(group.kind)} ${count(group.tokens)}`);
  const offloaded = offloadedTokens(hit);
  const lower = offloaded ? ` + ${count(offloaded)} offloaded` : "";
  const split = parts.length > 1 ? ` (${parts.join(", ")})` : "";
  return count(hit.gpu_cached_tokens) + lower + split;
}
