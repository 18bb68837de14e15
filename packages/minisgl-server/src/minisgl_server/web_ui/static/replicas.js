// Buttons that select the replica to show; hidden if there is only one.

import { byId, count, element, setText } from "./dom.js";

export function showReplicas(state, select) {
  const list = byId("replicas");
  list.hidden = state.replicas.length === 0;
  state.replicas.forEach((each, index) => {
    if (!list.children[index]) {
      list.append(element("button", { type: "button", onclick: () => select(each.replica) }));
    }
    const button = list.children[index];
    const restarts = each.num_starts > 1 ? ` · ${count(each.num_starts - 1, "restart")}` : "";
    const load = each.is_ready ? `${count(each.num_requests, "request")}, ${each.num_routed.toLocaleString("en")} routed` : "not ready";
    setText(button, `Replica ${each.replica} · ${load}${restarts}`);
    button.setAttribute("aria-pressed", String(each.replica === state.replica));
  });
}
