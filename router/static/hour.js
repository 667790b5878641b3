// The last hour, as small charts: of the router, and of the replicas whose rows are open.

import { NeedsKey, ask } from "./ask.js";
import { byId, element, resize, svgElement, write } from "./dom.js";
import { count, milliseconds, rate } from "./words.js";

const EVERY_MS = 5000;
const AT_ONCE = 16; // what the router gives in one response
const [WIDTH, HEIGHT] = [240, 36];
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;

// most: the top of the scale, where it is fixed.
const CHARTS = [
  { name: "Requests a second", of: "requests_per_s", say: rate },
  { name: "Prompt tokens from cache", of: "reused_share", say: percent, most: 1 },
  { name: "First byte, 9 of 10", of: "first_byte_s", say: (value) => milliseconds(1000 * value) },
  { name: "Mispredicted", of: "mispredicted_share", say: percent, most: 1, level: "bad" },
  { name: "Blocks on the GPU", of: "gpu_blocks", say: count },
];

let shown = { replicas: {} };
let askedAt = -EVERY_MS;
let askedFor = "";

// Asks for the hour if what is shown is old, or of other replicas. Returns whether it did.
export async function askForHour(openIds) {
  const ids = openIds.slice(0, AT_ONCE);
  const query = ids.map((id) => `replica=${encodeURIComponent(id)}`).join("&");
  const now = performance.now();
  if (now - askedAt < EVERY_MS && query === askedFor) return false;
  [askedAt, askedFor] = [now, query];
  try {
    shown = await ask("operator", `history?${query}`);
  } catch (error) {
    askedFor = null;
    if (error instanceof NeedsKey) throw error;
    return false;
  }
  drawCharts(byId("hour-charts"), shown.router, shown.step_s);
  return true;
}

export const hourOf = (id) => shown.replicas[id];
export const stepOf = () => shown.step_s;

export function drawCharts(parent, hour, step) {
  const figures = resize(parent, CHARTS.length, makeChart);
  CHARTS.forEach((chart, index) => drawChart(figures[index], chart, hour[chart.of], step));
}

function makeChart() {
  const made = element("figure", "chart");
  const caption = element("figcaption");
  caption.append(element("span", "what"), element("span", "value"));
  const image = svgElement("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
  });
  image.append(svgElement("path", { class: "area" }), svgElement("path", { class: "line" }));
  made.append(caption, image);
  return made;
}

function drawChart(figure, chart, values, step) {
  const known = values.filter((value) => value !== null);
  const last = values.at(-1);
  const text = last === null || last === undefined ? "–" : chart.say(last);
  write(figure.querySelector(".what"), chart.name);
  write(figure.querySelector(".value"), text);
  const top = chart.most ?? Math.max(...known, 0);
  const highest = known.length ? chart.say(Math.max(...known)) : "nothing measured";
  const label = `${chart.name}: ${text} now, at most ${highest} in the last hour`;
  const image = figure.querySelector("svg");
  image.setAttribute("aria-label", label);
  if (figure.title !== label) figure.title = label;
  const [line, area] = paths(values, top || 1, 3600 / step);
  image.querySelector(".line").setAttribute("d", line);
  image.querySelector(".area").setAttribute("d", area);
  image.dataset.level = chart.level && known.some((value) => value > 0) ? chart.level : "";
}

// The newest at the right; a step in which nothing was measured is a gap.
function paths(values, top, steps) {
  const x = (index) => WIDTH - ((values.length - 1 - index) / steps) * WIDTH;
  const y = (value) => HEIGHT - 1 - (Math.min(value, top) / top) * (HEIGHT - 3);
  let [line, area, start] = ["", "", null];
  const close = (index) => {
    if (start !== null) area += `L${x(index).toFixed(1)} ${HEIGHT}L${start} ${HEIGHT}Z`;
    start = null;
  };
  values.forEach((value, index) => {
    if (value === null) {
      close(index - 1);
      return;
    }
    // A point by itself would not be seen.
    const from = start === null ? Math.max(x(index) - WIDTH / steps, 0) : x(index);
    const [at, high] = [from.toFixed(1), y(value).toFixed(1)];
    const here = `${start === null ? "M" : "L"}${at} ${high}L${x(index).toFixed(1)} ${high}`;
    line += here;
    area += here;
    start ??= at;
  });
  close(values.length - 1);
  return [line, area];
}
