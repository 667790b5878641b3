// The table of replicas: a page of them at a time, those with problems first.

import { arrange, byId, element, fromTemplate, mark, resize, show, widen, write, writeWhole } from "./dom.js";
import { byName, byTier, count, duration, kindOfGroup, plural, shortCount } from "./words.js";

const PER_PAGE = 12;
const SEVERITY = { bad: 0, warn: 1, good: 2 };

const rows = new Map(); // id -> tbody; those on the page
let replicas = []; // with the level of what is worst
let page = 0;

export function startReplicas() {
  byId("replicas-back").addEventListener("click", () => turn(-1));
  byId("replicas-on").addEventListener("click", () => turn(1));
  byId("replicas-wrong").addEventListener("change", fromTheStart);
  byId("replicas-search").addEventListener("input", fromTheStart);
}

export function showReplicas(overview) {
  replicas = overview.replicas.map((replica) => ({ ...replica, level: replica.problems[0]?.level ?? "good" }));
  replicas.sort((left, right) => SEVERITY[left.level] - SEVERITY[right.level] || byName(left.id, right.id));
  draw();
  return replicas;
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
  const why = byId("replicas-wrong").checked ? "No replica has a problem." : "No replica of that name.";
  write(byId("replicas-none"), replicas.length ? why : "The router has no replicas. Add one with POST /replicas.");
}

function drawRows(shown) {
  const scale = scaleOf(replicas);
  drawHead(scale);
  const ids = new Set(shown.map((replica) => replica.id));
  for (const id of [...rows.keys()]) if (!ids.has(id)) rows.delete(id);
  const nodes = shown.map((replica) => {
    if (!rows.has(replica.id)) rows.set(replica.id, fromTemplate("replica-template"));
    drawReplica(rows.get(replica.id), replica, scale);
    return rows.get(replica.id);
  });
  arrange(byId("replica-table"), nodes, 1);
}

// One scale for each tier over all replicas: bars can be compared from row to row, and a large tier does not flatten a small one.
function scaleOf(all) {
  const most = { GPU: 1 };
  let groups = 1;
  for (const replica of all) {
    groups = Math.max(groups, replica.groups.length);
    for (const [, tier, blocks] of replica.blocks) most[tier] = Math.max(most[tier] ?? 1, blocks);
  }
  return { most, groups, tiers: Object.keys(most).sort(byTier) };
}

function drawHead(scale) {
  const table = byId("replica-table");
  const head = table.querySelector(".cache-head");
  table.style.setProperty("--tiers", scale.tiers.length);
  table.style.setProperty("--groups", scale.groups);
  const cells = resize(head, scale.tiers.length + 1, () => element("span"));
  scale.tiers.forEach((tier, index) => write(cells[index + 1], tier));
}

function drawReplica(row, replica, scale) {
  mark(row, "level", replica.level);
  mark(row, "replica", replica.id);
  writeWhole(row.querySelector(".id"), replica.id);
  row.querySelector(".id").title = `${replica.id} at ${replica.url}`;
  write(row.querySelector(".state"), stateOf(replica));
  drawLoad(row, replica);
  drawFeed(row.querySelector(".feed .word"), replica);
  drawCache(row.querySelector(".cache-grid"), replica, scale);
  drawProblems(row.querySelector(".problems"), replica.problems);
}

function stateOf(replica) {
  const since = replica.state === replica.health ? ` ${duration(replica.seconds_in_health)}` : `, ${replica.health}`;
  return replica.state + since;
}

function drawLoad(row, replica) {
  const tokens = replica.prefill_tokens ? ` · ${count(replica.prefill_tokens)} tokens to prefill` : "";
  writeWhole(row.querySelector(".own"), `${count(replica.requests)} in flight${tokens}`);
  writeWhole(row.querySelector(".engine"), engineLoad(replica.gauges));
}

function engineLoad(gauges) {
  if (!gauges) return "engine tells nothing";
  const [running, waiting, usage] = gauges;
  const kv = usage === null ? "" : ` · KV ${Math.round(usage * 100)} %`;
  return `${count(running)} run · ${count(waiting)} wait${kv}`;
}

const WORST_FIRST = ["dead", "suspect", "recovering", "connecting", "live"];
const FEED_LEVEL = { dead: "bad", suspect: "bad", recovering: "warn", connecting: "warn", live: "good" };

// A replica may be configured to have no events; then nothing is missing.
function drawFeed(word, { sources, sources_configured: isMeant }) {
  const worst = WORST_FIRST.find((state) => sources.some((source) => source.state === state));
  const several = sources.length > 1 ? ` ${sources.filter((source) => source.state === worst).length}/${sources.length}` : "";
  write(word, worst ? worst + several : "none");
  mark(word, "level", FEED_LEVEL[worst] ?? (isMeant && !sources.length ? "" : "warn"));
}

function drawCache(grid, replica, scale) {
  const groups = groupsOf(replica);
  const cells = resize(grid, groups.length * (scale.tiers.length + 1), () => element("span"));
  groups.forEach((group, line) => {
    const start = line * (scale.tiers.length + 1);
    drawLabel(cells[start], group.label);
    scale.tiers.forEach((tier, column) => drawBar(cells[start + column + 1], group.blocks[tier] ?? 0, tier, scale));
  });
}

// Groups of the layout, and those that hold blocks without being in it.
function groupsOf(replica) {
  const numbers = [...new Set([...replica.groups.keys(), ...replica.blocks.map(([group]) => group)])].sort((a, b) => a - b);
  return numbers.map((number) => {
    const known = replica.groups[number];
    const held = replica.blocks.filter(([group]) => group === number).map(([, tier, blocks]) => [tier, blocks]);
    return { label: known ? kindOfGroup(known.kind, known.reach) : `group ${number}`, blocks: Object.fromEntries(held) };
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
  mark(fill, "tier", String(Math.min(scale.tiers.indexOf(tier), 3)));
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

// The one line that says whether anything is wrong.
export function showTrouble(found) {
  const wrong = found.filter((replica) => replica.problems.length);
  const line = byId("trouble");
  mark(line, "level", found.length ? (wrong[0]?.level ?? "good") : "warn");
  const first = wrong.slice(0, 3).map((replica) => `${replica.id} ${replica.problems[0].text}`);
  const rest = wrong.length > first.length ? ` · and ${count(wrong.length - first.length)} more` : "";
  const verb = wrong.length === 1 ? "has" : "have";
  const text = wrong.length ? `${plural(wrong.length, "replica")} ${verb} problems: ${first.join(" · ")}${rest}` : "All replicas are well.";
  writeWhole(line.querySelector(".text"), found.length ? text : "The router has no replicas.");
  return wrong.length;
}
