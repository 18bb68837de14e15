// Layout of the radix tree, from cached nodes to boxes: newest at the top, each node aligned with its first child.

export const HEIGHT = 40;
const ROW = 47;
const GAP = 30;
const ROOT_WIDTH = 18;
const MARGIN = 4;
const PAGE = 7;

// Merges nodes with a single child and equal use into one box.
function join(cached) {
  const nodes = new Map();
  const root = { id: 0, children: [], numTokens: 0 };
  nodes.set(0, root);
  for (const each of cached) {
    const node = {
      id: each.node_id, ids: [each.node_id], parent: nodes.get(each.parent_id), children: [], text: each.text, lastPage: each.last_page,
      numTokens: each.num_tokens, numPages: each.num_pages, numLocks: each.num_locks, numHits: each.num_hits, sinceHitS: each.since_hit_s,
    };
    nodes.set(node.id, node);
    node.parent.children.push(node);
  }
  const visit = (node) => {
    while (node !== root && node.children.length === 1 && alike(node, node.children[0])) {
      const [next] = node.children;
      node.ids.push(...next.ids);
      node.numTokens += next.numTokens;
      node.numPages += next.numPages;
      node.lastPage = next.lastPage;
      node.children = next.children;
      for (const child of node.children) child.parent = node;
    }
    node.newest = Math.max(...(node.ids ?? [0]), ...node.children.map(visit));
    node.children.sort((a, b) => b.newest - a.newest);
    return node.newest;
  };
  visit(root);
  return root;
}

const alike = (a, b) => a.numLocks === b.numLocks && a.numHits === b.numHits;

// Returns the root with the positions of all nodes, and the size of the tree.
export function layOut(cached) {
  const root = join(cached);
  const nodes = [];
  let width = 0;
  let numLeaves = 0;
  const place = (node, x, level) => {
    node.level = level;
    node.x = x;
    node.width = node === root ? ROOT_WIDTH : Math.max(184, Math.min(310, 20 + PAGE * node.numPages));
    width = Math.max(width, x + node.width);
    if (node !== root) nodes.push(node);
    for (const child of node.children) place(child, x + node.width + GAP, level + 1);
    node.y = node.children.length ? node.children[0].y : MARGIN + ROW * numLeaves++;
  };
  place(root, MARGIN, 0);
  return { root, nodes, width: width + MARGIN, height: Math.max(1, numLeaves) * ROW + 2 * MARGIN };
}
