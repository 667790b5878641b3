// The only ways in which this page changes itself: text is written as text, and only if it differs.

export const byId = (id) => document.getElementById(id);

export function fromTemplate(id) {
  return byId(id).content.firstElementChild.cloneNode(true);
}

export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// With a tooltip, since the text may be cut.
export function writeWhole(node, text) {
  write(node, text);
  if (node.title !== text) node.title = text;
}

const TAIL = 10;

// Names often differ only at their ends: where there is no room, the middle is left out.
export function writeName(node, name) {
  if (node.title === name) return;
  const cut = Math.max(name.length - TAIL, 0);
  node.classList.add("cut");
  node.replaceChildren(
    element("span", "head", name.slice(0, cut)),
    element("span", "tail", name.slice(cut)),
  );
  node.title = name;
}

export function mark(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

export function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

export function widen(node, fraction) {
  const width = `${(100 * Math.min(Math.max(fraction, 0), 1)).toFixed(2)}%`;
  if (node.style.width !== width) node.style.width = width;
}

export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

export function svgElement(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Gives *parent* exactly *length* children: existing ones are kept, *make* makes the others.
export function resize(parent, length, make) {
  while (parent.children.length > length) parent.lastElementChild.remove();
  while (parent.children.length < length) parent.append(make());
  return parent.children;
}

// Makes *nodes* the children after the first *fixed* ones, in this order, moving as few as it can.
export function arrange(parent, nodes, fixed = 0) {
  nodes.forEach((node, index) => {
    const there = parent.children[index + fixed];
    if (there !== node) parent.insertBefore(node, there ?? null);
  });
  while (parent.children.length > nodes.length + fixed) parent.lastElementChild.remove();
}
