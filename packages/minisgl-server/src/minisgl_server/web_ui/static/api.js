// Requests to the server, with the API key if there is one.

const KEY = "minisgl-api-key";

export class KeyNeeded extends Error {}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const message = await response.json().then((body) => body.error.message, () => `Status ${response.status}.`);
  if (response.status === 401) {
    window.dispatchEvent(new CustomEvent("key-needed", { detail: Boolean(key) }));
    throw new KeyNeeded(message);
  }
  throw new Error(message);
}

export const postJson = (path, body, signal) =>
  call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

// Yields the JSON of each server-sent event until [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
