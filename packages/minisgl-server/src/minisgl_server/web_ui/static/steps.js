// Chart of the steps: prefill tokens go up from the middle, decoding requests go down.

import { byId, canvasContext, count, cssColor, requestColor } from "./dom.js";

const HEIGHT = 150;
const COLUMN = 7;
const MAX_CELL_HEIGHT = 7;
const PAUSE_S = 0.7;
let hovered = null;

export function showSteps({ steps }) {
  const canvas = byId("steps");
  const { context, width } = canvasContext(canvas, HEIGHT);
  const shown = steps.slice(-Math.floor(width / COLUMN));
  const parts = shown.map(split);
  const mostPrefill = Math.max(16, ...parts.map(({ prefill }) => prefill));
  const mostDecodes = Math.max(8, ...shown.map((step) => step.num_decodes));
  const middle = Math.round(HEIGHT * 0.5);
  const scale = (middle - 14) / Math.sqrt(mostPrefill);
  const cell = Math.min(MAX_CELL_HEIGHT, (HEIGHT - middle - 4) / mostDecodes);
  context.fillStyle = cssColor("--quiet");
  context.font = "10px system-ui, sans-serif";
  if (parts.some(({ prefill }) => prefill)) context.fillText(`${mostPrefill} tokens`, 0, 9);
  context.fillStyle = cssColor("--line");
  context.fillRect(0, middle, width, 1);
  shown.forEach((step, index) => {
    const x = index * COLUMN;
    if (index && step.time_s - shown[index - 1].time_s > PAUSE_S) {
      context.fillStyle = cssColor("--line");
      context.fillRect(x - 1, 12, 1, HEIGHT - 12);
    }
    if (index === hovered) {
      context.fillStyle = cssColor("--soft");
      context.fillRect(x - 1, 0, COLUMN, HEIGHT);
    }
    drawStep(context, step, parts[index], { x, middle, scale, cell });
  });
  canvas.onpointermove = ({ offsetX }) => {
    hovered = Math.floor(offsetX / COLUMN);
    showSteps({ steps });
  };
  canvas.onpointerleave = () => {
    hovered = null;
    showSteps({ steps });
  };
  byId("steps-detail").textContent = describe(shown[hovered ?? -1] ?? shown.at(-1));
}

// Prefill tokens of a step, and number of decodes among its listed requests. Not all requests of a large step are listed.
function split(step) {
  const prefill = step.num_tokens - step.num_decodes;
  const numListed = step.requests.length;
  let numPrefills = 0;
  for (let left = prefill; left > 0 && numPrefills < numListed; left -= step.num_new[numListed - numPrefills]) numPrefills += 1;
  return { prefill, numListedDecodes: numListed - numPrefills };
}

function drawStep(context, step, { prefill, numListedDecodes }, { x, middle, scale, cell }) {
  let top = middle;
  const tokenHeight = prefill ? (Math.sqrt(prefill) * scale) / prefill : 0;
  step.requests.forEach((number, index) => {
    context.fillStyle = requestColor(number);
    if (index < numListedDecodes) {
      context.fillRect(x, middle + 2 + index * cell, COLUMN - 1, Math.max(1, cell - 1));
    } else {
      const height = Math.max(1, step.num_new[index] * tokenHeight);
      top -= height;
      context.fillRect(x, top, COLUMN - 1, Math.max(1, height - (height > 4 ? 1 : 0)));
    }
  });
  const numHidden = step.num_decodes - numListedDecodes;
  if (numHidden > 0) {
    context.fillStyle = cssColor("--quiet");
    context.fillRect(x, middle + 2 + numListedDecodes * cell, COLUMN - 1, numHidden * cell);
  }
}

function describe(step) {
  if (!step) return "No steps yet. Send a message.";
  const { prefill, numListedDecodes } = split(step);
  const names = step.requests.slice(numListedDecodes).map((number, index) => `#${number}: ${step.num_new[numListedDecodes + index]}`);
  const words = [`Step ${step.step.toLocaleString("en")}`, count(step.num_decodes, "decode")];
  if (prefill) words.push(`${count(prefill, "prefill token")} (${names.slice(0, 12).join(", ")})`);
  return words.join(" · ");
}
