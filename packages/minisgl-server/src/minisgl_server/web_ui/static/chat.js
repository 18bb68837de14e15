// Chat: conversations side by side, and the message box.

import { byId, element } from "./dom.js";
import { Lane } from "./lane.js";

const MAX_LANES = 8;
const SYSTEM =
  "You are a friendly assistant who explains things to curious people. Answer in two or three short sentences, in plain words, " +
  "and give one example from everyday life. If you do not know something, say so.";
const QUESTIONS = ["Why is the sky blue?", "What does a cache do in a computer?", "How do birds fly?", "Why do we sleep?"];

const lanes = [];

export function startChat(nudge) {
  const message = byId("message");
  // Conversations selected in the menu, to which Send and Stop apply.
  const targets = () => (byId("target").value === "all" ? lanes : [lanes[Number(byId("target").value)]]);
  const showStop = () => {
    byId("stop").disabled = !targets().some((lane) => lane.isRunning);
    byId("stop").ariaLabel = `Stop ${byId("target").selectedOptions[0].textContent}`;
  };
  const changed = () => {
    showStop();
    nudge();
  };
  const setLanes = (number) => {
    while (lanes.length > number) {
      const lane = lanes.pop();
      lane.stop();
      lane.node.remove();
    }
    while (lanes.length < number) {
      lanes.push(new Lane(lanes.length + 1, changed));
      byId("lanes").append(lanes.at(-1).node);
    }
    byId("num-lanes").value = number;
    byId("fewer").disabled = number === 1;
    byId("more").disabled = number === MAX_LANES;
    const all = element("option", { value: "all", textContent: number === 1 ? "conversation 1" : `all ${number} conversations` });
    const each = lanes.map((_, index) => element("option", { value: index, textContent: `conversation ${index + 1}` }));
    byId("target").replaceChildren(all, ...(number === 1 ? [] : each));
    showStop();
  };
  const settings = () => ({
    system: byId("system").value.trim(),
    temperature: byId("temperature").valueAsNumber,
    maxTokens: byId("max-tokens").valueAsNumber,
  });
  const send = () => {
    const text = message.value.trim();
    const asked = targets().filter((lane) => !lane.isRunning);
    if (!text || asked.length === 0 || !byId("temperature").reportValidity() || !byId("max-tokens").reportValidity()) return;
    for (const lane of asked) lane.ask(text, settings());
    message.value = "";
  };

  byId("system").value = SYSTEM;
  byId("fewer").addEventListener("click", () => setLanes(lanes.length - 1));
  byId("more").addEventListener("click", () => setLanes(lanes.length + 1));
  byId("target").addEventListener("change", showStop);
  byId("stop").addEventListener("click", () => targets().forEach((lane) => lane.stop()));
  byId("demo").addEventListener("click", () => {
    setLanes(Math.max(lanes.length, QUESTIONS.length));
    QUESTIONS.forEach((question, index) => lanes[index].ask(question, settings()));
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && lanes.forEach((lane) => lane.stop()));
  setLanes(1);
}

// Show the engine's request of each conversation.
export function showConversations(state) {
  const numbers = new Map(state.requests.map((request) => [request.request_id, request.number]));
  for (const lane of lanes) lane.showNumber(numbers.get(lane.requestId) ?? null);
}
