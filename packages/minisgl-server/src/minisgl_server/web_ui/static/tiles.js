// Figures at the top of the page.

import { byId, element, shape } from "./dom.js";

const tiles = new Map();

function tile(name) {
  if (!tiles.has(name)) {
    const value = element("dd");
    const note = element("dd", { className: "quiet" });
    byId("tiles").append(element("div", { className: "card tile" }, element("dt", { textContent: name }), value, note));
    tiles.set(name, { value, note });
  }
  return tiles.get(name);
}

function set(name, text, note) {
  const shown = tile(name);
  shown.value.textContent = text;
  shown.note.replaceChildren(note);
}

export function showTiles(state) {
  const { totals, pages, rates, history } = state;
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");
  const used = pages.num_private + pages.num_locked;
  set("Running", `${state.num_running}`, `${state.num_waiting} waiting`);
  set("Output", `${rates.output.toFixed(rates.output < 10 ? 1 : 0)} tok/s`, sparkline(history));
  set("Prefill", `${rates.prefill.toFixed(0)} tok/s`, `${totals.num_prefilled_tokens.toLocaleString("en")} tokens so far`);
  set("Prefix hits", percent(totals.num_cached_tokens, totals.num_prompt_tokens),
    `${totals.num_cached_tokens.toLocaleString("en")} of ${totals.num_prompt_tokens.toLocaleString("en")} prompt tokens`);
  set("KV in use", percent(used, pages.capacity), `${percent(pages.num_evictable, pages.capacity)} cached`);
  set("Finished", totals.num_finished.toLocaleString("en"), `${totals.num_aborted} aborted, ${totals.num_preemptions} preempted`);
}

// Output tokens per second over the last minute.
function sparkline(history) {
  const now = history.at(-1).time_s;
  const rates = history.slice(1).map((each, index) => {
    const before = history[index];
    return [each.time_s, (each.num_output_tokens - before.num_output_tokens) / (each.time_s - before.time_s || 1)];
  });
  const most = Math.max(1, ...rates.map(([, rate]) => rate));
  const points = rates.map(([time, rate]) => `${(100 - (100 * (now - time)) / 60).toFixed(1)},${(17 - (15 * rate) / most).toFixed(1)}`);
  return shape("svg", { viewBox: "0 0 100 18", preserveAspectRatio: "none", class: "sparkline", "aria-hidden": "true" },
    shape("polyline", { points: points.join(" ") }));
}
