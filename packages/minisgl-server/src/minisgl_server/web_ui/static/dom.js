// Helpers to create and find elements. Text is never parsed as HTML.

export const byId = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function shape(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Unchanged text is not set again, so that screen readers do not repeat it.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

export const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The golden angle gives neighbouring numbers distant colours.
export const requestColor = (number) => `oklch(${cssColor("--request-lightness")} 0.15 ${(number * 137.508) % 360})`;

// Sizes a canvas to its box's width and `height` CSS pixels, at the screen's resolution.
export function canvasContext(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return { context, width };
}
