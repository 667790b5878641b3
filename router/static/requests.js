// The list of requests, the latest first; each line is filled in as more of it becomes known.

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
import { count, endLabel, milliseconds, plural, timeOfDay, whyUnknown } from "./words.js";

const KEPT = 512;
const SHOWN = 60;

const requests = new Map(); // number -> the router's last word on it
const rows = new Map(); // number -> li
let isPaused = false;
let held = []; // the numbers shown while paused

export function startRequests() {
  byId("requests-pause").addEventListener("click", () => pause(!isPaused));
  byId("requests-wrong").addEventListener("change", redraw);
  byId("requests-search").addEventListener("input", redraw);
}

export function forgetRequests() {
  requests.clear();
  rows.clear();
  pause(false);
}

// *isCut*: more has changed than fits into this response. Requests seen running may have ended
// unseen, and must not stay for good.
export function takeRequests(changed, isCut) {
  if (isCut) {
    for (const { number, end } of requests.values()) if (end === null) requests.delete(number);
  }
  for (const request of changed) requests.set(request.number, request);
  const numbers = [...requests.keys()].sort((left, right) => right - left);
  for (const number of numbers.slice(KEPT)) requests.delete(number);
  draw();
}

function pause(isWanted) {
  isPaused = isWanted;
  held = isPaused ? latest().map((request) => request.number) : [];
  byId("requests-pause").setAttribute("aria-pressed", String(isPaused));
  draw();
}

// A new filter applies to the requests of now, paused or not.
function redraw() {
  if (isPaused) held = latest().map((request) => request.number);
  draw();
}

function latest() {
  const wanted = [...requests.values()].filter(isWanted);
  return wanted.sort((left, right) => right.number - left.number).slice(0, SHOWN);
}

function isWanted(request) {
  const words = byId("requests-search").value.toLowerCase();
  const named = `${request.replica ?? ""} ${request.model} ${request.request_id} ${request.trace_id ?? ""}`.toLowerCase();
  return (!words || named.includes(words)) && (!byId("requests-wrong").checked || isWrong(request));
}

// An estimate is not expected to be right.
const isMispredicted = ({ verdict, predicted }) =>
  !predicted.approximate && (verdict === "over" || verdict === "under");
const isWrong = (request) => request.failed || request.attempts > 1 || isMispredicted(request);

function draw() {
  const now = latest();
  const shown = isPaused ? held.map((number) => requests.get(number)).filter(Boolean) : now;
  const numbers = new Set(shown.map((request) => request.number));
  for (const number of [...rows.keys()]) if (!numbers.has(number)) rows.delete(number);
  arrange(
    byId("request-list"),
    shown.map((request) => rowOf(request)),
  );
  show(byId("requests-none"), !shown.length);
  const none = requests.size ? "None of the last requests matches." : "No request yet.";
  write(byId("requests-none"), none);
  const newer = isPaused ? now.filter((request) => request.number > (held[0] ?? 0)).length : 0;
  write(byId("requests-pause"), isPaused ? resumeLabel(newer) : "Pause");
}

function resumeLabel(newer) {
  if (!newer) return "Resume";
  return `Resume (${newer >= SHOWN ? `${SHOWN}+` : newer} new)`;
}

function rowOf(request) {
  let row = rows.get(request.number);
  if (!row) {
    row = fromTemplate("request-template");
    row.firstElementChild.addEventListener("click", () => unfold(row, request.number));
    rows.set(request.number, row);
  }
  if (row.dataset.change !== String(request.change)) fill(row, request);
  return row;
}

function unfold(row, number) {
  const isOpen = row.lastElementChild.hidden;
  row.firstElementChild.setAttribute("aria-expanded", String(isOpen));
  show(row.lastElementChild, isOpen);
  if (isOpen && !isPaused) pause(true); // the line being read must stay
  fill(row, requests.get(number));
}

function fill(row, request) {
  mark(row, "change", String(request.change));
  mark(row, "level", levelOf(request));
  const cell = (name) => row.querySelector(`.${name}`);
  write(cell("when"), timeOfDay(request.arrived_at));
  writeName(cell("where"), request.replica ?? "none");
  drawHit(cell("hit"), request);
  drawVerdict(cell("verdict"), request);
  write(cell("speed"), speedOf(request));
  drawStatus(cell("status"), request);
  writeWhole(cell("reason"), reasonOf(request));
  if (!row.lastElementChild.hidden) drawMore(row.lastElementChild, request);
}

function levelOf(request) {
  const isWrong = isMispredicted(request);
  if (request.failed || (isWrong && request.verdict === "over")) return "bad";
  return isWrong || request.attempts > 1 ? "warn" : "";
}

function drawHit(cell, request) {
  const { gpu_cached_tokens: gpu, cached_tokens: cached } = request.predicted;
  const all = request.prompt_tokens || 1;
  widen(cell.querySelector(".gpu"), gpu / all);
  widen(cell.querySelector(".lower"), (cached - gpu) / all);
  const tick = cell.querySelector(".tick");
  show(tick, request.actual !== null);
  const percent = Math.min(100, (100 * (request.actual ?? 0)) / all);
  tick.style.left = `${percent.toFixed(2)}%`;
  writeWhole(cell.querySelector(".hit-text"), hitText(request));
}

function hitText(request) {
  if (!request.prompt_tokens) return request.unknown ? "not known" : "no prompt";
  const about = request.predicted.approximate ? "≈ " : "";
  return `${about}${count(request.predicted.cached_tokens)} / ${count(request.prompt_tokens)}`;
}

function drawVerdict(cell, request) {
  const { approximate } = request.predicted;
  mark(cell, "verdict", approximate ? "none" : request.verdict ?? "none");
  const by = Math.abs(request.predicted.cached_tokens - (request.actual ?? 0));
  const words = { exact: "exact", near: "near", over: `over ${count(by)}`, under: `under ${count(by)}` };
  const word = words[request.verdict] ?? (request.end === null ? "" : "not reported");
  write(cell, approximate && request.verdict ? `≈ ${word}` : word);
}

function speedOf(request) {
  if (request.first_byte_ms !== null) return milliseconds(request.first_byte_ms);
  return request.end === null ? "…" : "";
}

function drawStatus(cell, request) {
  const end = request.end === null ? "running" : endLabel(request.end);
  const retried = request.attempts > 1 ? `↻${request.attempts - 1}` : null;
  writeWhole(cell, [request.status, end, retried].filter((word) => word !== null).join(" "));
  mark(cell, "end", request.end ?? "running");
}

function reasonOf(request) {
  const suspect = request.predicted.suspect ? "events of this replica were lost; " : "";
  return request.replica === null ? "No replica could take it." : suspect + request.reason;
}

function drawMore(list, request) {
  const facts = factsOf(request);
  const nodes = resize(list, 2 * facts.length, () =>
    element(list.children.length % 2 ? "dd" : "dt"),
  );
  facts.forEach(([name, value], index) => {
    write(nodes[2 * index], name);
    write(nodes[2 * index + 1], value);
  });
}

function factsOf(request) {
  const { gpu_cached_tokens: gpu, cached_tokens: cached } = request.predicted;
  const { actual, attempts, last_failure: failure } = request;
  const isEstimate = request.predicted.approximate;
  const split = isEstimate
    ? `about ${count(cached)}, by estimate`
    : `${count(gpu)} on the GPU, ${count(cached - gpu)} offloaded`;
  const facts = [
    ["Request id", request.request_id],
    ["Path", `${request.path}${request.stream ? ", streamed" : ""}`],
    ["Model", request.model],
    ["Policy", request.policy],
    ["Why", reasonOf(request)],
    ["Predicted", `${split}, of ${plural(request.prompt_tokens, "token")}`],
    ["Reported", actual === null ? "nothing comparable" : plural(actual, "token")],
  ];
  if (request.trace_id) facts.push(["Trace id", request.trace_id]);
  if (request.dp_rank !== null) facts.push(["Rank", String(request.dp_rank)]);
  if (request.unknown) facts.push(["Prompt not known in full", whyUnknown(request.unknown)]);
  if (failure) {
    const tried = `tried ${plural(attempts, "replica")}`;
    facts.push(["Failed attempts", `the last one: ${failure.replaceAll("_", " ")}; ${tried}`]);
  }
  if (request.total_ms !== null) facts.push(["Took", milliseconds(request.total_ms)]);
  return facts;
}
