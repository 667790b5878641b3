// What an open row of the table shows of its replica: its hour, how full each of its KV cache groups
// is, and the buttons that take it out of rotation and back.

import { NeedsKey, ask, askForKey } from "./ask.js";
import { element, mark, resize, show, widen, write } from "./dom.js";
import { drawCharts, hourOf, stepOf } from "./hour.js";
import { count, plural } from "./words.js";

const DENSE = "full_attention";
const open = new Set();
let present = new Set(); // the ids of the replicas that there are

export function learnIds(ids) {
  present = new Set(ids);
}

// A row stays open while its replica is away; its hour is not asked for.
export const openIds = () => [...open].filter((id) => present.has(id));

export function makeInsight(row, id, redraw) {
  row.querySelector(".open").addEventListener("click", () => {
    if (!open.delete(id)) open.add(id);
    redraw();
  });
  row.querySelector(".drain").addEventListener("click", () => changeRotation(row, id));
}

export function drawInsight(row, replica) {
  const isOpen = open.has(replica.id);
  row.querySelector(".open").setAttribute("aria-expanded", String(isOpen));
  show(row.querySelector(".insight"), isOpen);
  if (!isOpen) return;
  const hour = hourOf(replica.id);
  if (hour) drawCharts(row.querySelector(".charts"), hour, stepOf());
  drawFills(row.querySelector(".fills"), replica.groups, hour?.removed_blocks ?? []);
  write(row.querySelector(".lost"), whatWasLost(replica, hour));
  const button = row.querySelector(".drain");
  const isDraining = replica.state === "draining";
  write(button, isDraining ? "Undrain" : "Drain");
  button.title = isDraining ? "Send it requests again" : "Send it nothing new";
  mark(button, "action", isDraining ? "undrain" : "drain");
}

const tokensOf = ({ blocks, block_size: size }) => (blocks.GPU ?? 0) * (size ?? 1);

// Of each group what it holds; what slid out of its window, as far as the dense group still has it:
// no prompt needs that; and what left the GPU in the last hour besides. In a dense group all of that
// was evicted. In one with a window events do not say which block slid out and which was evicted.
function drawFills(list, groups, removedBlocks) {
  const dense = groups.filter((group) => group.kind === DENSE).map(tokensOf);
  const fills = groups.map((group) => fillOf(group, dense, removedBlocks[group.number] ?? 0));
  const most = Math.max(1, ...fills.map(({ held, slid, gone }) => held + slid + gone));
  const items = resize(list, fills.length, makeFill);
  fills.forEach((fill, index) => {
    const item = items[index];
    write(item.querySelector(".label"), groups[index].label);
    for (const part of ["held", "slid", "gone"]) {
      widen(item.querySelector(`.${part}`), fill[part] / most);
    }
    write(item.querySelector(".text"), fill.text);
  });
}

function fillOf(group, dense, removedBlocks) {
  const held = tokensOf(group);
  const removed = removedBlocks * (group.block_size ?? 1);
  const text = `${count(held)} tokens held`;
  if (group.kind === DENSE || !dense.length) {
    const also = removed ? `, ${count(removed)} evicted in the last hour` : "";
    return { held, slid: 0, gone: removed, text: text + also };
  }
  const slid = Math.max(Math.max(...dense) - held, 0);
  const also = slid ? `, ${count(slid)} slid out` : "";
  const left = removed ? `, ${count(removed)} slid out or evicted in the last hour` : "";
  return { held, slid, gone: Math.max(removed - slid, 0), text: text + also + left };
}

function makeFill() {
  const item = element("li");
  const bar = element("span", "fill");
  bar.append(element("i", "held"), element("i", "slid"), element("i", "gone"));
  item.append(element("span", "label"), bar, element("span", "text"));
  return item;
}

function whatWasLost(replica, hour) {
  const usage = replica.engine_load?.kv_cache_usage ?? null;
  const busy = usage === null ? "" : ` Running requests hold ${Math.round(usage * 100)} % of it.`;
  const removed = hour?.removed_blocks.reduce((sum, blocks) => sum + blocks, 0);
  return hour ? `${plural(removed, "block")} left the GPU in the last hour.${busy}` : "";
}

async function changeRotation(row, id) {
  const button = row.querySelector(".drain");
  const said = row.querySelector(".said");
  const path = `replicas/${encodeURIComponent(id)}/${button.dataset.action}`;
  button.disabled = true;
  try {
    await ask("operator", path, "");
    write(said, "");
  } catch (error) {
    if (error instanceof NeedsKey && (await askForKey("operator"))) await changeRotation(row, id);
    else write(said, error.message || "the router did not respond");
  } finally {
    button.disabled = false;
  }
}
