// What an open row of the table shows of its replica: its hour, how full each of its KV cache groups
// is, and the buttons that take it out of rotation and back.

import { NeedsKey, ask, askForKey } from "./ask.js";
import { element, mark, resize, show, widen, write } from "./dom.js";
import { drawCharts, hourOf, stepOf } from "./hour.js";
import { count, plural } from "./words.js";

const DENSE = "full_attention";
const open = new Set();

export const openIds = () => [...open];

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
  drawFills(row.querySelector(".fills"), replica.groups);
  write(row.querySelector(".lost"), whatWasLost(replica, hour));
  const button = row.querySelector(".drain");
  const isDraining = replica.state === "draining";
  write(button, isDraining ? "Undrain" : "Drain");
  button.title = isDraining ? "Send it requests again" : "Send it nothing new";
  mark(button, "action", isDraining ? "undrain" : "drain");
}

const tokensOf = ({ blocks, block_size: size }) => (blocks.GPU ?? 0) * (size ?? 1);

// A group with a window keeps a part of what the dense group keeps: the rest slid out of the window,
// and no prompt needs it.
function drawFills(list, groups) {
  const dense = groups.filter((group) => group.kind === DENSE).map(tokensOf);
  const most = Math.max(1, ...groups.map(tokensOf));
  const items = resize(list, groups.length, makeFill);
  groups.forEach((group, index) => {
    const held = tokensOf(group);
    const isWindow = group.kind !== DENSE && dense.length > 0;
    const slid = isWindow ? Math.max(Math.max(...dense) - held, 0) : 0;
    const item = items[index];
    write(item.querySelector(".label"), group.label);
    widen(item.querySelector(".held"), held / most);
    widen(item.querySelector(".slid"), slid / most);
    const also = slid ? `, ${count(slid)} slid out` : "";
    write(item.querySelector(".text"), `${count(held)} tokens held${also}`);
  });
}

function makeFill() {
  const item = element("li");
  const bar = element("span", "fill");
  bar.append(element("i", "held"), element("i", "slid"));
  item.append(element("span", "label"), bar, element("span", "text"));
  return item;
}

function whatWasLost(replica, hour) {
  const usage = replica.engine_load?.kv_cache_usage ?? null;
  const busy = usage === null ? "" : ` Running requests hold ${Math.round(usage * 100)} % of it.`;
  return hour ? `${plural(hour.removed_blocks, "block")} evicted in the last hour.${busy}` : "";
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
