// What the pointer or the keyboard is on: its pages, runs and request light up everywhere.

export const selection = { owners: new Set(), source: null };

export function select(owners, source) {
  if (owners.size === 0 && selection.source !== source) return;
  Object.assign(selection, { owners, source: owners.size ? source : null });
  window.dispatchEvent(new CustomEvent("selection"));
}

// Owners in the page map: a run by its number, a request by this.
export const requestOwner = (number) => -1 - number;
