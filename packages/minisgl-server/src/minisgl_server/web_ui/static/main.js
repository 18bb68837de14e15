// Creates and connects the parts of the page.

import { setKey } from "./api.js";
import { showConversations, startChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { showPages } from "./pages.js";
import { showReplicas } from "./replicas.js";
import { showRequests } from "./requests.js";
import { showSteps } from "./steps.js";
import { showTiles } from "./tiles.js";
import { showTree } from "./tree.js";
import { Watch } from "./watch.js";

let latest = null;

function show(state) {
  latest = state;
  const { model, dtype, device, max_seq_len } = state.engine;
  byId("model").textContent = `${model} · ${dtype} on ${device} · context ${max_seq_len.toLocaleString("en")}`;
  byId("prompts-note").hidden = state.has_text;
  showConversations(state);
  showReplicas(state, (replica) => watch.select(replica));
  showTiles(state);
  showTree(state);
  showSteps(state);
  showPages(state);
  showRequests(state);
}

function showStatus(text, isBad) {
  setText(byId("status"), text);
  byId("status").classList.toggle("bad", isBad);
}

const watch = new Watch(show, showStatus);

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  watch.nudge();
});
window.addEventListener("key-needed", ({ detail: hadOne }) => {
  const form = byId("key-form");
  if (hadOne) form.querySelector("label").textContent = "The API key was rejected. Enter another one.";
  if (!form.hidden) return;
  form.hidden = false;
  byId("key").focus();
});
const redraw = () => latest && show(latest);
window.addEventListener("resize", redraw);
window.addEventListener("selection", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
startChat(() => watch.nudge());
watch.run();
