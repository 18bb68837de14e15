// Running and waiting requests.

import { byId, element, requestColor } from "./dom.js";
import { requestOwner, select, selection } from "./selection.js";

const CHAR = 6.65; // width of a character in pixels
const rows = new Map();

function makeRow(number) {
  const row = element("li", { className: "request" });
  const parts = { dot: element("i", { className: "dot" }), what: element("span"), bar: element("span", { className: "bar" }), text: element("q") };
  parts.cached = element("i", { className: "from-cache" });
  parts.computed = element("i", { className: "computed" });
  parts.output = element("i", { className: "output" });
  parts.bar.append(parts.cached, parts.computed, parts.output);
  row.append(parts.dot, parts.what, parts.bar, parts.text);
  row.addEventListener("pointerenter", () => select(new Set(parts.owners), `request ${number}`));
  row.addEventListener("pointerleave", () => select(new Set(), `request ${number}`));
  return { row, parts };
}

export function showRequests(state) {
  byId("requests-summary").textContent = `${state.num_running} running, ${state.num_waiting} waiting`;
  const numbers = new Set(state.requests.map((request) => request.number));
  for (const [number, { row }] of rows) {
    if (!numbers.has(number)) {
      row.remove();
      rows.delete(number);
    }
  }
  const nodeOfPage = new Map(state.nodes.map((node) => [node.last_page, node]));
  const nodes = new Map(state.nodes.map((node) => [node.node_id, node]));
  for (const request of state.requests) {
    if (!rows.has(request.number)) rows.set(request.number, makeRow(request.number));
    const { row, parts } = rows.get(request.number);
    parts.owners = [requestOwner(request.number)];
    for (let node = nodeOfPage.get(request.last_shared_page); node; node = nodes.get(node.parent_id)) parts.owners.push(node.node_id);
    byId("requests").append(row);
    fill(row, parts, request, state.has_text);
  }
}

function fill(row, parts, request, hasText) {
  const cached = Math.max(0, request.num_cached);
  const doing = !request.is_running ? "waits" : request.num_output ? "decodes" : "prefills";
  row.classList.toggle("selected", selection.owners.has(requestOwner(request.number)));
  parts.dot.style.background = request.is_running ? requestColor(request.number) : "";
  parts.what.textContent = `#${request.number} ${doing} · prompt ${request.num_prompt} (${cached} cached) · ${request.num_output} out`;
  const total = request.num_prompt + Math.max(request.num_output, 1);
  const width = (part, tokens) => (part.style.width = `${(100 * Math.max(0, tokens)) / total}%`);
  width(parts.cached, cached);
  width(parts.computed, Math.min(request.num_computed, request.num_prompt) - cached);
  width(parts.output, request.num_output);
  parts.output.style.background = requestColor(request.number);
  const room = Math.max(10, Math.floor(parts.text.clientWidth / CHAR) - 1);
  parts.text.hidden = !hasText;
  const text = request.text.replaceAll("\n", " ");
  parts.text.textContent = text.length > room ? `…${text.slice(-room)}` : text;
}
