// What the reader has chosen, and the same in the address's fragment, so that a view can be sent and comes back on load.
// A fragment without "=" is an ordinary link within the page and changes nothing here.
flip.state = (() => {
  "use strict";
  const phases = Object.keys(flip.data.heatmaps);
  const KINDS = flip.data.kinds.filter((kind) => kind.recorded).map((kind) => kind.kind);
  const first = () => ({
    phase: phases[0],
    colour: "class",
    group: "row",
    origin: "all",
    kinds: flip.data.kinds.filter((kind) => kind.shown).map((kind) => kind.kind),
    cell: null, // [row of the grid, column's number]
    element: null, // rank index, or head and element, of the chosen value; null: the whole row
    x: null, // visible columns and rows, null: all
    y: null,
  });
  const CHOICES = {
    phase: phases,
    colour: ["class", "origin", "magnitude", "ulp"],
    group: ["row", "layer"],
    origin: ["all", "added", "inherited", "unknown"],
  };
  const state = first();

  const numbers = (text, count) => {
    const found = text.split(":").map(Number);
    return found.length === count && found.every(Number.isFinite) ? found : null;
  };

  function read() {
    Object.assign(state, first());
    const hash = window.location.hash.slice(1);
    if (!hash.includes("=")) return;
    const given = new URLSearchParams(hash);
    for (const [name, allowed] of Object.entries(CHOICES)) {
      if (allowed.includes(given.get(name))) state[name] = given.get(name);
    }
    if (given.has("kinds")) state.kinds = KINDS.filter((kind) => given.get("kinds").split("-").includes(kind));
    if (given.has("cell")) state.cell = numbers(given.get("cell"), 2);
    if (given.has("element")) state.element = numbers(given.get("element"), 1)?.[0] ?? null;
    for (const axis of ["x", "y"]) if (given.has(axis)) state[axis] = numbers(given.get(axis), 2);
  }

  function write() {
    const plain = first();
    const given = new URLSearchParams();
    for (const name of Object.keys(CHOICES)) if (state[name] !== plain[name]) given.set(name, state[name]);
    if (state.kinds.join() !== plain.kinds.join()) given.set("kinds", state.kinds.join("-"));
    for (const name of ["cell", "x", "y"]) {
      if (state[name]) given.set(name, state[name].map((value) => +value.toFixed(2)).join(":"));
    }
    if (state.cell && state.element !== null) given.set("element", state.element);
    const text = given.toString().replaceAll("%3A", ":");
    const address = window.location.href.split("#")[0];
    if (text) window.history.replaceState(null, "", `${address}#${text}`);
    else if (window.location.hash.includes("=")) window.history.replaceState(null, "", address);
  }

  return Object.assign(state, { read, write });
})();
