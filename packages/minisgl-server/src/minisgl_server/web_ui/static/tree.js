// Radix tree: one box per cached node, with a width by its pages, and a dot per request that reads it.

import { byId, count, element, requestColor, setText, shape } from "./dom.js";
import { HEIGHT, layOut } from "./layout.js";
import { select, selection } from "./selection.js";

const MAX_DOTS = 6;
const MAX_PAGES = 41;
const CHAR = 6.65; // width of a character in pixels
const HEAT = [0, 1, 2, 4, 8, 16];

const drawn = new Map();
const svg = shape("svg", { role: "presentation" });
const links = shape("g", { class: "links" });
const boxes = shape("g");
svg.append(links, shape("circle", { class: "root", r: 6 }), boxes);
let current = null;
let nodes = [];

export function showTree(state) {
  const { pages } = state;
  if (!svg.parentNode) start();
  const tree = layOut(state.nodes);
  const numTokens = state.nodes.reduce((sum, each) => sum + each.num_tokens, 0);
  const all = (pages.num_locked + pages.num_evictable) * pages.page_size;
  const rest = all > numTokens ? `, ${(all - numTokens).toLocaleString("en")} of them in nodes not shown` : "";
  byId("tree-summary").textContent = `${count(tree.nodes.length, "node")}, ${count(all, "token")} cached${rest}`;
  nodes = tree.nodes;
  svg.setAttribute("width", tree.width);
  svg.setAttribute("height", tree.height);
  const middle = (node) => node.y + HEIGHT / 2;
  svg.querySelector(".root").setAttribute("cx", 12);
  svg.querySelector(".root").setAttribute("cy", middle(tree.root));
  const readers = readersOf(state, nodes);
  const inUseLast = nodes.toSorted((a, b) => a.numLocks - b.numLocks);
  links.replaceChildren(...inUseLast.map((node) => link(node, middle)));
  const seen = new Set(nodes.map((node) => node.id));
  for (const [id, box] of drawn) {
    if (!seen.has(id)) {
      box.group.remove();
      drawn.delete(id);
    }
  }
  for (const node of nodes) draw(node, readers.get(node) ?? []);
  svg.parentNode.classList.toggle("empty", nodes.length === 0);
  describe();
}

function start() {
  const box = byId("tree");
  box.append(svg, element("p", { className: "quiet", textContent: "Nothing is cached yet. Prompts appear here as they are computed; a prefix that prompts share is one node." }));
  box.addEventListener("keydown", move);
  box.addEventListener("focus", () => go(nodes.find((node) => node.id === current) ?? nodes[0]));
  box.addEventListener("blur", () => go(null));
}

// Requests that read each node, found by the last page that they share with the cache.
function readersOf(state, all) {
  const byPage = new Map(state.nodes.map((each) => [each.last_page, each.node_id]));
  const nodeOfId = new Map(all.flatMap((node) => node.ids.map((id) => [id, node])));
  const readers = new Map();
  for (const request of state.requests) {
    let node = nodeOfId.get(byPage.get(request.last_shared_page));
    for (; node?.ids; node = node.parent) readers.set(node, [...(readers.get(node) ?? []), request.number]);
  }
  return readers;
}

function link(node, middle) {
  const [x1, y1, x2, y2] = [node.parent.x + node.parent.width, middle(node.parent), node.x, middle(node)];
  const bend = x1 + 14;
  const turn = Math.min(10, (y2 - y1) / 2);
  const d = turn ? `M${x1} ${y1}H${bend - turn}Q${bend} ${y1} ${bend} ${y1 + turn}V${y2 - turn}Q${bend} ${y2} ${bend + turn} ${y2}H${x2}` : `M${x1} ${y1}H${x2}`;
  return shape("path", { d, class: node.numLocks ? "in-use" : "" });
}

function draw(node, readers) {
  if (!drawn.has(node.id)) drawn.set(node.id, make(node));
  const box = drawn.get(node.id);
  box.node = node;
  const heat = HEAT.findLastIndex((least) => node.numHits >= least);
  box.group.style.transform = `translate(${node.x}px, ${node.y}px)`;
  const selected = node.ids.some((id) => selection.owners.has(id));
  box.group.setAttribute("class", `node heat-${heat}${node.numLocks ? " in-use" : ""}${selected ? " selected" : ""}`);
  box.group.setAttribute("aria-label", words(node));
  box.group.setAttribute("aria-level", node.level);
  for (const rect of box.rects) rect.setAttribute("width", node.width);
  const dots = readers.slice(0, MAX_DOTS);
  const room = Math.floor((node.width - 18 - dots.length * 9) / CHAR);
  const text = node.text.replaceAll("\n", "⏎") || `node ${node.id}`;
  box.text.textContent = text.length > room ? `${text.slice(0, room - 1)}…` : text;
  box.facts.textContent = `${node.numTokens} tok${node.numHits ? ` · ${count(node.numHits, "hit")}` : ""}${node.numLocks ? ` · ${node.numLocks} reading` : ""}`;
  const numPages = Math.min(node.numPages, MAX_PAGES, Math.floor((node.width - 18) / 7));
  box.pages.setAttribute("d", Array.from({ length: numPages }, (_, index) => `M${9 + 7 * index} 33.5h5`).join(""));
  box.dots.replaceChildren(...dots.map((number, index) => {
    const dot = shape("circle", { cx: node.width - 12 - 9 * index, cy: 11, r: 3.6 });
    dot.style.fill = requestColor(number);
    return dot;
  }));
  if (node.numHits > box.numHits) flash(box.group);
  box.numHits = node.numHits;
}

function make(node) {
  const rects = [shape("rect", { height: HEIGHT, rx: 8, class: "back" }), shape("rect", { height: HEIGHT, rx: 8, class: "glow" })];
  const text = shape("text", { x: 9, y: 15, class: "text" });
  const facts = shape("text", { x: 9, y: 27, class: "facts" });
  const pages = shape("path", { class: "pages" });
  const dots = shape("g");
  const group = shape("g", { id: `node-${node.id}`, role: "treeitem" }, ...rects, text, facts, pages, dots);
  const box = { group, rects, text, facts, pages, dots, node, numHits: node.numHits };
  group.addEventListener("pointerenter", () => go(box.node));
  group.addEventListener("pointerleave", () => go(null));
  boxes.append(group);
  return box;
}

function flash(group) {
  if (!group.animate || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  group.querySelector(".glow").animate([{ strokeOpacity: 1, strokeWidth: 7 }, { strokeOpacity: 0, strokeWidth: 1 }], { duration: 1400, easing: "ease-out" });
}

function words(node) {
  const use = node.numLocks ? `, ${node.numLocks} reading` : `, last used ${node.sinceHitS.toFixed(0)} s ago`;
  return `${count(node.numTokens, "token")}, ${count(node.numPages, "page")}, ${count(node.numHits, "hit")}${use}`;
}

function go(node) {
  current = node?.id ?? null;
  const tree = byId("tree");
  if (node) tree.setAttribute("aria-activedescendant", `node-${node.id}`);
  else tree.removeAttribute("aria-activedescendant");
  select(new Set(node?.ids ?? []), "tree");
}

function describe() {
  const node = nodes.find((each) => each.id === current);
  setText(byId("tree-detail"), node ? `${words(node)}${node.text && `: ${node.text}…`}` : "Point at a node, or go there with the arrow keys, to see its pages below.");
}

// Arrow keys: right to the child, left to the parent, up and down to neighbours.
function move(event) {
  const node = nodes.find((each) => each.id === current);
  if (!node) return;
  const siblings = node.parent.children;
  const neighbour = (step) => siblings[siblings.indexOf(node) + step];
  const parent = node.parent.id ? node.parent : undefined;
  const next = { ArrowRight: () => node.children[0], ArrowLeft: () => parent, ArrowDown: () => neighbour(1), ArrowUp: () => neighbour(-1) }[event.key];
  if (!next) return;
  event.preventDefault();
  go(next() ?? node);
  drawn.get(current)?.group.scrollIntoView({ block: "nearest", inline: "nearest" });
}
