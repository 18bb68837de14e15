// One conversation: its messages, and the response that is being streamed.

import { events, postJson } from "./api.js";
import { element, requestColor } from "./dom.js";

export class Lane {
  #messages = [];
  #abort = null;
  #follows = true; // scroll with the response, unless the user has scrolled up

  constructor(number, changed) {
    this.changed = changed;
    this.requestId = null;
    this.said = element("div", { className: "said-list" });
    const head = element("div", { className: "lane-head" }, element("span", { textContent: `Conversation ${number}` }));
    this.node = element("article", { className: "lane card" }, head, this.said);
    this.node.ariaLabel = `Conversation ${number}`;
    this.said.setAttribute("role", "log");
    this.said.tabIndex = 0; // allows scrolling with the keyboard
    this.said.ariaLabel = `Messages of conversation ${number}`;
    this.said.addEventListener("scroll", () => {
      this.#follows = this.said.scrollHeight - this.said.scrollTop < this.said.clientHeight + 30;
    });
  }

  get isRunning() {
    return this.#abort !== null;
  }

  stop() {
    this.#abort?.abort();
  }

  // Number of the running request in the engine, or null; the conversation has the request's colour.
  showNumber(number) {
    this.node.style.borderLeftColor = number === null ? "" : requestColor(number);
  }

  async ask(text, { system, temperature, maxTokens }) {
    if (this.isRunning) return;
    const question = { role: "user", content: text };
    const answer = element("p", { className: "said assistant running" });
    const turn = element("p", { className: "turn" });
    this.said.append(element("p", { className: "said user", textContent: text }), answer, turn);
    this.#toEnd();
    this.#run(true);
    const start = system ? [{ role: "system", content: system }] : [];
    const body = {
      messages: [...start, ...this.#messages, question],
      temperature, max_tokens: maxTokens, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const result = { startS: performance.now() / 1000, firstS: null, lastS: null, usage: null, reason: null };
    try {
      for await (const event of events(await postJson("v1/chat/completions", body, this.#abort.signal))) {
        this.#take(event, answer, result);
        showTurn(turn, result);
        if (this.#follows) this.#toEnd();
      }
    } catch (error) {
      if (error.name === "AbortError") result.reason = "stopped";
      else this.said.append(element("p", { className: "said failed", textContent: error.message }));
    }
    showTurn(turn, result);
    answer.classList.remove("running");
    if (result.firstS !== null) this.#messages.push(question, { role: "assistant", content: answer.textContent });
    this.#run(false);
  }

  #take(event, answer, result) {
    this.requestId = `${event.id}-0`;
    result.usage = event.usage ?? result.usage;
    const choice = event.choices[0];
    if (!choice) return;
    result.reason = choice.finish_reason ?? result.reason;
    const { reasoning_content: reasoning, content } = choice.delta;
    if (!reasoning && !content) return;
    if (reasoning) {
      if (!answer.previousSibling.classList.contains("reasoning")) answer.before(element("p", { className: "said reasoning" }));
      answer.previousSibling.append(reasoning);
    }
    if (content) answer.append(content);
    result.lastS = performance.now() / 1000;
    result.firstS ??= result.lastS;
  }

  #toEnd() {
    this.said.scrollTop = this.said.scrollHeight;
  }

  #run(isRunning) {
    this.#abort = isRunning ? new AbortController() : null;
    this.requestId = null;
    this.changed();
  }
}

const ENDS = { length: "limit reached", stopped: "stopped" };

function showTurn(turn, { startS, firstS, lastS, usage, reason }) {
  if (firstS === null || usage === null) return;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const bar = element("i");
  bar.style.width = `${(100 * cached) / usage.prompt_tokens}%`;
  const reuse = element("span", { className: "reuse", title: `${cached} of ${usage.prompt_tokens} prompt tokens came from the cache` }, bar);
  const speed = usage.completion_tokens > 1 ? ` · ${((usage.completion_tokens - 1) / Math.max(lastS - firstS, 1e-3)).toFixed(1)} tok/s` : "";
  turn.replaceChildren(
    reuse,
    `TTFT ${(1000 * (firstS - startS)).toFixed(0)} ms${speed} · prompt ${usage.prompt_tokens} (`,
    element("b", { textContent: `${cached} cached` }),
    `) · output ${usage.completion_tokens}${ENDS[reason] ? ` · ${ENDS[reason]}` : ""}`,
  );
}
