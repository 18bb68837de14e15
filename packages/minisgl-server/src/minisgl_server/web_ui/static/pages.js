// KV pages: a bar of the counts, and a map with one cell per page.

import { byId, canvasContext, count, cssColor, element, requestColor } from "./dom.js";
import { ownerRequest, selection } from "./selection.js";

const HEIGHT = 150;
const KINDS = [
  ["locked", "shared, in use", "num_locked"],
  ["private", "a request's own", "num_private"],
  ["cached", "cached, not in use", "num_evictable"],
  ["free", "free", "num_free"],
];
let hovered = null;

export function showPages(state) {
  const { pages } = state;
  byId("pages-summary").textContent = `${count(pages.capacity, "page")} of ${count(pages.page_size, "token")}`;
  const entries = KINDS.map(([kind, words, name]) => {
    const entry = element("li", { className: kind }, element("i"), element("b", { textContent: pages[name].toLocaleString("en") }), ` ${words}`);
    entry.dataset.count = pages[name];
    return entry;
  });
  byId("pages-legend").replaceChildren(...entries);
  draw(state);
}

function draw(state) {
  const { pages } = state;
  const canvas = byId("pages");
  const { context, width } = canvasContext(canvas, HEIGHT);
  const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * HEIGHT) / pages.num_mapped))));
  const columns = Math.max(1, Math.floor(width / size));
  const gap = size > 4 ? 1 : 0;
  const nodes = new Map(state.nodes.map((node) => [node.node_id, node]));
  const anySelected = selection.owners.size > 0;
  pages.map_starts.forEach((start, index) => {
    const owner = pages.map_owners[index];
    context.fillStyle = colorOf(owner, nodes);
    context.globalAlpha = anySelected && !selection.owners.has(owner) ? 0.28 : 1;
    const end = pages.map_starts[index + 1] ?? pages.num_mapped;
    for (let cell = start; cell < end; cell++) {
      context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
    }
  });
  canvas.onpointermove = ({ offsetX, offsetY }) => {
    hovered = Math.floor(offsetY / size) * columns + Math.floor(offsetX / size);
    describe(state);
  };
  canvas.onpointerleave = () => {
    hovered = null;
    describe(state);
  };
  describe(state);
}

function colorOf(owner, nodes) {
  if (owner === 0) return cssColor("--free");
  const request = ownerRequest(owner);
  if (request !== null) return requestColor(request);
  return cssColor(nodes.get(owner)?.num_locks ? "--locked" : "--cached");
}

function describe(state) {
  const { pages } = state;
  let text = pages.stride > 1 ? `The map shows every ${pages.stride}th page.` : "Each cell is a page; point at one to see its owner.";
  if (hovered !== null && hovered < pages.num_mapped) {
    let index = pages.map_starts.findIndex((start) => start > hovered);
    if (index < 0) index = pages.map_starts.length;
    const owner = pages.map_owners[index - 1];
    const node = state.nodes.find((each) => each.node_id === owner);
    const request = ownerRequest(owner);
    const whose = owner === 0 ? "free" : request !== null ? `request #${request}'s own` : node ? `cached: ${node.text.replaceAll("\n", " ") || `node ${node.node_id}`}` : "cached";
    text = `Page ${1 + hovered * pages.stride}, ${whose}`;
  }
  byId("pages-detail").textContent = text;
}
