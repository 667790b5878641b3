// The table of replicas, page by page, in the order of the overview: the worst problems first.

import {
  arrange,
  byId,
  element,
  fromTemplate,
  mark,
  resize,
  show,
  widen,
  write,
  writeName,
  writeWhole,
} from "./dom.js";
import { drawInsight, learnIds, makeInsight } from "./insight.js";
import { count, shortCount } from "./words.js";

const PER_PAGE = 12;

const rows = new Map(); // id -> tbody; those on the page
let replicas = [];
let tiers = []; // the fastest first
let page = 0;

export function startReplicas() {
  byId("replicas-back").addEventListener("click", () => turn(-1));
  byId("replicas-on").addEventListener("click", () => turn(1));
  byId("replicas-wrong").addEventListener("change", fromTheStart);
  byId("replicas-search").addEventListener("input", fromTheStart);
}

export function showReplicas(overview) {
  ({ replicas, tiers } = overview);
  learnIds(replicas.map((replica) => replica.id));
  draw();
  drawStores(overview.stores ?? []);
}

export function showOnlyProblems() {
  byId("replicas-wrong").checked = true;
  byId("replicas-search").value = "";
  fromTheStart();
}

function fromTheStart() {
  page = 0;
  draw();
}

function turn(step) {
  page += step;
  draw();
}

function draw() {
  const found = replicas.filter(isWanted);
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  page = Math.min(Math.max(page, 0), pages - 1);
  const shown = found.slice(page * PER_PAGE, (page + 1) * PER_PAGE);
  drawPager(found.length, shown.length, pages);
  drawRows(shown);
}

function isWanted(replica) {
  const words = byId("replicas-search").value.toLowerCase();
  const isNamed = !words || `${replica.id} ${replica.url}`.toLowerCase().includes(words);
  return isNamed && (!byId("replicas-wrong").checked || replica.problems.length > 0);
}

function drawPager(found, shown, pages) {
  const first = page * PER_PAGE + 1;
  write(byId("replicas-page"), found ? `${first}–${first + shown - 1} of ${count(found)}` : "0");
  byId("replicas-back").disabled = page === 0;
  byId("replicas-on").disabled = page === pages - 1;
  show(byId("replicas-none"), !found);
  write(byId("replicas-none"), whyNone());
}

function whyNone() {
  if (!replicas.length) return "The router has no replicas. Add one with POST /replicas.";
  const isFiltered = byId("replicas-wrong").checked;
  return isFiltered ? "No replica has a problem." : "No replica of that name.";
}

function drawRows(shown) {
  const scale = makeScale();
  drawHead(scale);
  const ids = new Set(shown.map((replica) => replica.id));
  for (const id of [...rows.keys()]) if (!ids.has(id)) rows.delete(id);
  const nodes = shown.map((replica) => {
    if (!rows.has(replica.id)) rows.set(replica.id, makeRow(replica.id));
    drawReplica(rows.get(replica.id), replica, scale);
    return rows.get(replica.id);
  });
  arrange(byId("replica-table"), nodes, 1);
}

function makeRow(id) {
  const row = fromTemplate("replica-template");
  makeInsight(row, id, draw);
  return row;
}

// One scale for each tier over all replicas: bars can be compared from row to row, and a large tier
// does not flatten a small one.
function makeScale() {
  const most = Object.fromEntries(tiers.map((tier) => [tier, 1]));
  let groups = 1;
  for (const replica of replicas) {
    groups = Math.max(groups, replica.groups.length);
    for (const { blocks } of replica.groups)
      for (const tier in blocks) most[tier] = Math.max(most[tier], blocks[tier]);
  }
  return { most, groups };
}

function drawHead(scale) {
  const table = byId("replica-table");
  const head = table.querySelector(".cache-head");
  table.style.setProperty("--tiers", tiers.length);
  table.style.setProperty("--groups", scale.groups);
  const cells = resize(head, tiers.length + 1, () => element("span"));
  tiers.forEach((tier, index) => write(cells[index + 1], tier));
}

function drawReplica(row, replica, scale) {
  mark(row, "level", replica.level);
  mark(row, "replica", replica.id);
  writeName(row.querySelector(".id"), replica.id);
  row.querySelector(".name").title = `${replica.id} at ${replica.url}`;
  write(row.querySelector(".state"), stateOf(replica));
  drawLoad(row, replica);
  drawStreams(row.querySelector(".feed .word"), replica);
  drawCache(row.querySelector(".cache-grid"), replica, scale);
  drawProblems(row.querySelector(".problems"), replica.problems);
  drawInsight(row, replica);
}

function stateOf(replica) {
  const isHealth = replica.state === replica.health;
  return replica.state + (isHealth ? ` ${replica.health_duration}` : `, ${replica.health}`);
}

function drawLoad(row, replica) {
  const waiting = replica.prefill_tokens;
  const tokens = waiting ? ` · ${count(waiting)} tokens to prefill` : "";
  writeWhole(row.querySelector(".own"), `${count(replica.requests)} in flight${tokens}`);
  writeWhole(row.querySelector(".engine"), engineLoad(replica.engine_load));
}

function engineLoad(load) {
  if (!load) return "engine reports no load";
  const usage = load.kv_cache_usage;
  const kv = usage === null ? "" : ` · KV ${Math.round(usage * 100)} %`;
  return `${count(load.running)} run · ${count(load.waiting)} wait${kv}`;
}

const WORST_FIRST = ["dead", "suspect", "recovering", "connecting", "live"];
const STREAM_LEVEL = {
  dead: "bad",
  suspect: "bad",
  recovering: "warn",
  connecting: "warn",
  live: "good",
};

// A replica may be configured to have no event stream; then none is missing.
function drawStreams(word, { sources, approximate, sources_configured: isConfigured }) {
  const having = (state) => sources.filter((source) => source.state === state).length;
  const worst = WORST_FIRST.find(having);
  const several = sources.length > 1 ? ` ${having(worst)}/${sources.length}` : "";
  const estimated = approximate.length ? "approximate" : null;
  const state = worst ? worst + several : null;
  write(word, [state, estimated].filter((part) => part !== null).join(", ") || "none");
  mark(word, "level", STREAM_LEVEL[worst] ?? (isConfigured && !sources.length ? "" : "warn"));
}

function drawCache(grid, { groups }, scale) {
  const width = tiers.length + 1;
  const cells = resize(grid, groups.length * width, () => element("span"));
  groups.forEach((group, line) => {
    drawLabel(cells[line * width], group.label);
    tiers.forEach((tier, column) => {
      drawBar(cells[line * width + column + 1], group.blocks[tier] ?? 0, tier, scale);
    });
  });
}

function drawLabel(cell, label) {
  if (cell.className !== "group") {
    cell.className = "group";
    cell.replaceChildren();
  }
  writeWhole(cell, label);
}

function drawBar(cell, blocks, tier, scale) {
  if (cell.className !== "held") {
    cell.className = "held";
    cell.replaceChildren(element("span", "bar"), element("span", "blocks"));
    cell.firstChild.append(element("i"));
  }
  const fill = cell.firstChild.firstChild;
  mark(fill, "tier", String(Math.min(tiers.indexOf(tier), 3)));
  widen(fill, blocks / scale.most[tier]);
  write(cell.lastChild, shortCount(blocks));
}

function drawProblems(row, problems) {
  show(row, problems.length > 0);
  const items = resize(row.querySelector("ul"), problems.length, () => element("li"));
  problems.forEach((problem, index) => {
    write(items[index], problem.text);
    mark(items[index], "level", problem.level);
  });
}

// What several replicas share is no replica's own, so it has no bar in the table.
function drawStores(stores) {
  const list = byId("stores");
  show(list, stores.length > 0);
  const items = resize(list, stores.length, () => element("li"));
  stores.forEach(({ name, model, blocks, replicas: sharing }, index) => {
    const who = sharing === 1 ? "1 replica" : `${count(sharing)} replicas`;
    writeWhole(items[index], `Store ${name}: ${count(blocks)} blocks of ${model}, shared by ${who}`);
  });
}

// The one line that says whether anything is wrong. Returns how many replicas have problems.
export function showHeadline({ headline, replicas: all }) {
  const wrong = all.filter((replica) => replica.problems.length);
  const first = wrong.slice(0, 3).map(({ id, problems }) => `${id} ${problems[0].text}`);
  const more = wrong.length - first.length;
  const named = [...first, ...(more ? [`and ${count(more)} more`] : [])].join(" · ");
  const line = byId("headline");
  mark(line, "level", headline.level);
  writeWhole(line.querySelector(".text"), headline.text + (named ? `: ${named}` : ""));
  return wrong.length;
}
