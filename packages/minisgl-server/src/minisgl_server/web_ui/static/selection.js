// Selection by pointer or keyboard: its pages, nodes and request are highlighted in all views.

export const selection = { owners: new Set(), source: null };

export function select(owners, source) {
  if (owners.size === 0 && selection.source !== source) return;
  Object.assign(selection, { owners, source: owners.size ? source : null });
  window.dispatchEvent(new CustomEvent("selection"));
}

// Owner of a request's pages in the page map. Other owners: 0 is free, n > 0 is the cached node n, -1 is a cached node that is
// not listed.
export const requestOwner = (number) => -1 - number;

// Number of the request that is an owner, or null if the owner is no request.
export const ownerRequest = (owner) => (owner < -1 ? -1 - owner : null);
