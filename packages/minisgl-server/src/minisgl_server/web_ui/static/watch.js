// Polls the engine's state: often while it works, rarely while it is idle, and never while the page is hidden.

import { call, KeyNeeded } from "./api.js";

const BUSY_MS = 200;
const IDLE_MS = 1000;
const UNTIL_NUDGED_MS = 3_600_000;
const RATE_S = 2;
const MAX_STEPS = 400; // fills a chart of 2,800 pixels

export class Watch {
  #steps = [];
  #history = [];
  #shown = 0; // the replica that the steps and the history are of
  #selected = 0;
  #wake = () => {};

  constructor(show, showStatus) {
    Object.assign(this, { show, showStatus });
    document.addEventListener("visibilitychange", () => this.nudge());
  }

  // Show another replica from now on.
  select(replica) {
    this.#selected = replica;
    this.nudge();
  }

  // Poll at once.
  nudge() {
    this.#wake();
  }

  async run() {
    while (true) {
      let pause = document.hidden ? UNTIL_NUDGED_MS : IDLE_MS;
      try {
        if (!document.hidden) pause = await this.#poll();
      } catch (error) {
        this.showStatus(error instanceof KeyNeeded ? "API key needed" : error.message, true);
        if (error instanceof KeyNeeded) pause = UNTIL_NUDGED_MS;
      }
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, pause);
      });
    }
  }

  async #poll() {
    const since = this.#selected === this.#shown ? (this.#steps.at(-1)?.step ?? 0) : 0;
    const state = await (await call(`engine/state?since=${since}&replica=${this.#selected}`)).json();
    if (state.step < since || state.replica !== this.#shown) [this.#steps, this.#history] = [[], []]; // another engine
    this.#shown = state.replica;
    this.#steps = [...this.#steps, ...state.steps].slice(-MAX_STEPS);
    const moment = { time_s: state.time_s, ...state.totals };
    this.#history = [...this.#history.filter((each) => each.time_s > state.time_s - 60), moment];
    this.show({ ...state, steps: this.#steps, rates: this.#rates(), history: this.#history });
    this.showStatus("live", false);
    return state.num_running + state.num_waiting > 0 ? BUSY_MS : IDLE_MS;
  }

  // Tokens per second over the last RATE_S seconds.
  #rates() {
    const last = this.#history.at(-1);
    const first = this.#history.find((each) => each.time_s >= last.time_s - RATE_S);
    const rate = (name) => (last[name] - first[name]) / (last.time_s - first.time_s || 1);
    return { output: rate("num_output_tokens"), prefill: rate("num_prefilled_tokens") };
  }
}
