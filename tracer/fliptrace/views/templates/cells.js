// One cell in detail: moving to it by mouse or keyboard, its values, its rounding boundary, and how to test it.
flip.cells = (() => {
  "use strict";
  if (!flip.heatmap) return null;
  const { data, state, heatmap, rounding } = flip;
  const field = document.getElementById("heatmap-field");
  const told = document.getElementById("cell-told");
  const panel = document.getElementById("cell");
  const SHOWN = 64;
  const SVG = "http://www.w3.org/2000/svg";
  let focus = null; // [row of the view, embedded column]

  function node(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // ---- the focused cell
  function ring() {
    let mark = field.querySelector(".cell-ring");
    if (!mark) {
      mark = node("div", { class: "cell-ring", "aria-hidden": "true" });
      field.append(mark);
    }
    const layout = heatmap.element._fullLayout;
    const view = heatmap.view();
    mark.hidden = !focus || !layout || !view.rows.length;
    if (mark.hidden) return;
    const [row, column] = [Math.floor(focus[0] / view.rowPool), Math.floor(focus[1] / view.columnPool)];
    const x = [column * view.columnPool - 0.5, (column + 1) * view.columnPool - 0.5].map((value) => layout.xaxis._offset + layout.xaxis.d2p(value));
    const y = [row * view.rowPool - 0.5, (row + 1) * view.rowPool - 0.5].map((value) => layout.yaxis._offset + layout.yaxis.d2p(value));
    const inside = x[1] > layout.xaxis._offset - 1 && x[0] < layout.xaxis._offset + layout.xaxis._length + 1
      && y[1] > layout.yaxis._offset - 1 && y[0] < layout.yaxis._offset + layout.yaxis._length + 1;
    mark.hidden = !inside;
    mark.style.left = `${x[0] - 2}px`;
    mark.style.top = `${y[0] - 2}px`;
    mark.style.width = `${Math.max(8, x[1] - x[0] + 4)}px`;
    mark.style.height = `${Math.max(8, y[1] - y[0] + 4)}px`;
  }

  function move(row, column) {
    const view = heatmap.view();
    focus = [Math.max(0, Math.min(view.rows.length - 1, row)), Math.max(0, Math.min(view.map.shape[1] - 1, column))];
    ring();
    const found = heatmap.pick(...focus);
    if (found) told.textContent = heatmap.describe(found).replaceAll("\n", "; ");
  }

  function start() {
    const root = heatmap.current().root;
    const row = root ? heatmap.view().rows.findIndex((one) => one.members.includes(root[0])) : -1;
    return row < 0 ? [0, 0] : [row, root[1]];
  }

  field.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== field || !heatmap.view().rows.length) return;
    const view = heatmap.view();
    const [rows, columns] = [view.rowPool, view.columnPool];
    const moves = {
      ArrowRight: [0, columns], ArrowLeft: [0, -columns], ArrowDown: [rows, 0], ArrowUp: [-rows, 0],
      PageDown: [rows * 10, 0], PageUp: [-rows * 10, 0], Home: [0, -Infinity], End: [0, Infinity], Enter: null, " ": null,
    };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    if (!focus) { move(...start()); if (moves[event.key]) return; }
    const step = moves[event.key];
    if (step) move(focus[0] + step[0], focus[1] + step[1]);
    else { open(...focus); panel.querySelector("h3").focus(); }
  });
  field.addEventListener("focus", () => { if (!focus) move(...start()); });

  // ---- the panel
  function open(row, column) {
    const found = heatmap.pick(row, column);
    if (!found) return;
    state.cell = [found.row, found.number];
    state.element = null;
    focus = [row, column];
    state.write();
    ring();
    fill(found);
  }

  // After drawing: the ring stays on its cell, and a cell from the address opens.
  function follow() {
    if (!state.cell) { panel.hidden = true; ring(); return; }
    const map = heatmap.current();
    const at = map.columns.indexOf(state.cell[1]);
    const row = state.cell[0];
    if (at < 0 || !Number.isInteger(row) || row < 0 || row >= map.rows.length) { state.cell = null; panel.hidden = true; ring(); return; }
    const [member, column] = [Math.floor(row / map.pooled[0]), Math.floor(at / map.pooled[1])];
    const shown = heatmap.view().rows.findIndex((one) => one.members.includes(member));
    focus = shown < 0 ? null : [shown, column];
    ring();
    const i = member * map.shape[1] + column;
    // Of a merged cell only the worst is embedded: the address may name another one.
    fill(map.places ? heatmap.placeIn(map, i) : { i, row, at, number: state.cell[1] });
  }

  function elementsOf(map, found) {
    const all = map.elements;
    if (!all) return [];
    const wanted = found.row * map.columns.length + found.at;
    let [low, high] = [0, all.cells.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (all.cells[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    const kept = [];
    const row = map.rows[found.row];
    const type = row.kind === "shrink" ? data.rounded : all.cache_dtype;
    for (let n = low; n < all.cells.length && all.cells[n] === wanted; n += 1) {
      const code = all.indices[n];
      const cached = row.kind !== "shrink";
      kept.push({
        ...rounding.compare(all.reference[n], all.candidate[n], cached ? "none" : type),
        code, cached, type,
        rank: cached ? null : code,
        head: cached ? Math.floor(code / 65536) : null,
        dimension: cached ? code % 65536 : null,
        position: all.positions ? all.positions[n] : map.positions[found.at],
      });
    }
    return kept;
  }

  function originText(map, found) {
    const row = map.rows[found.row];
    if (map.classes[found.i] <= 0) return "";
    if (row.kind !== "shrink") return "Added here or inherited: not separable, it is made from other records.";
    if (map.origins[found.i] !== 1 && heatmap.separated(map, found.i)) {
      const [inherited, added] = [map.inherited[found.i], map.added[found.i]].map((value) => Number(value.toPrecision(6)));
      return `Told apart, as operands and weights were kept: the operand's difference accounts for up to ${inherited}, the shrink's own rounding added up to ${added}.`;
    }
    const kept = data.operands_kept ? "the adapter's weights are not in a trace" : "operands were kept as digests (--operands keeps their values)";
    return [
      "", "Added here, all of it: the row's operands are bit-equal in both executions.",
      `Inherited: an operand of this row differs. What the shrink adds to that is not separable: ${kept}.`,
      "Added here or inherited: not separable, it was launched or reduced differently.",
      "Added here or inherited: not separable, its operand was not recorded.",
    ][map.origins[found.i]];
  }

  const digits = (type) => (type === "float32" ? 8 : 4);
  const bitsOf = (element, which) => {
    if (!element.cached || element.type === "float32") return rounding.hex(element.bits[which], 8);
    if (element.type === "bfloat16") return rounding.hex(element.bits[which] >>> 16, 4);
    return rounding.hex(rounding.round(element.values[which], element.type), digits(element.type));
  };

  function nameOf(element) {
    return element.cached ? `head ${element.head}, element ${element.dimension}` : `rank index ${element.rank}`;
  }

  const brief = (value) => (value === null ? "none" : value === 0 ? "0, on it" : `${value > 0 ? "+" : ""}${Number(value.toPrecision(4))}`);

  function table(elements, chosen, refill) {
    const cached = elements[0].cached;
    const heads = cached ? ["element", "reference", "candidate"]
      : ["coordinate", "reference", "candidate", "FP32 ULP", "from the boundary", "class"];
    const body = elements.slice(0, SHOWN).map((element) => {
      const button = node("button", { type: "button", "aria-pressed": String(element.code === chosen) }, nameOf(element));
      button.addEventListener("click", () => refill(element.code === chosen ? null : element.code));
      const value = (which) => {
        const rounded = element.rounded ? [node("br"), node("span", { class: "bits" }, `→ ${rounding.exact(element.roundedValues[which])} ${rounding.hex(element.rounded[which], 4)}`)] : [];
        return node("td", {}, rounding.exact(element.values[which]), " ", node("span", { class: "bits" }, bitsOf(element, which)), ...rounded);
      };
      const cells = [node("td", {}, button), value(0), value(1)];
      if (!cached) {
        const distances = element.distances ? [brief(element.distances[0]), node("br"), brief(element.distances[1])] : ["none"];
        cells.push(
          node("td", { class: "number" }, element.values.every(Number.isFinite) ? element.ulp.toLocaleString("en") : "no number"),
          node("td", { class: "number" }, ...distances), node("td", {}, element.survives ? "surviving" : "latent"),
        );
      }
      return node("tr", element.code === chosen ? { class: "chosen" } : {}, ...cells);
    });
    const head = node("tr", {}, ...heads.map((text) => node("th", { scope: "col" }, text)));
    const made = node("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Table of this cell's values" });
    made.append(node("table", {}, node("thead", {}, head), node("tbody", {}, ...body)));
    return made;
  }

  // ---- how to test it: an edit for trace-intervene, as fliptrace_interventions reads it.
  function editFor(map, found, element) {
    const row = map.rows[found.row];
    const position = element ? element.position : map.positions[found.at];
    if (row.kind === "shrink") {
      const edit = { edit: "shrink", site: row.site, step: state.phase === "prefill" ? 0 : found.number, positions: [position] };
      if (element) Object.assign(edit, { rank_indices: [element.rank], expect: 1 });
      if (row.slice) edit.slice = row.slice;
      return { ...edit, value: "donor" };
    }
    const step = (state.phase === "prefill" ? 0 : found.number) + 1;
    const edit = { edit: "cache", step, layers: [row.layer], part: row.kind === "key" ? "keys" : "values", positions: [position] };
    if (element) Object.assign(edit, { heads: [element.head], dimensions: [element.dimension], expect: 1 });
    return { ...edit, value: "donor" };
  }

  const ascii = (text) => text.replace(/[^\x20-\x7e]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);

  function commandFor(edit) {
    return ["cat > edit.json <<'EDIT'", ascii(JSON.stringify(edit)), "EDIT", `trace-intervene ${flip.pairFolder} --edit edit.json`].join("\n");
  }

  async function copy(text, button) {
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch {
      // Without permission or a secure context: the old way, which needs a selection.
      const box = node("textarea", { class: "offscreen", readonly: "", "aria-hidden": "true", tabindex: "-1" });
      box.value = text;
      document.body.append(box);
      box.select();
      done = document.execCommand("copy");
      box.remove();
      button.focus();
    }
    button.textContent = done ? "Copied" : "Select and copy by hand";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  function test(map, found, element) {
    const row = map.rows[found.row];
    if (row.kind === "module") return [node("p", {}, "trace-intervene edits shrinks and the cache; a module's output cannot be put in by itself.")];
    if (map.classes[found.i] === 3) return [node("p", {}, "A structural difference cannot be substituted.")];
    const text = commandFor(editFor(map, found, element));
    const button = node("button", { type: "button", class: "copy", "aria-live": "polite" }, "Copy");
    button.addEventListener("click", () => copy(text, button));
    const what = element ? nameOf(element) : row.kind === "shrink" ? "the whole row" : "this position's whole row";
    const when = row.kind === "shrink" ? "" : ` The cache is edited before the next step, the first that reads it from there; not applicable where that step comes after the flip.`;
    return [
      node("h4", {}, `Test it: is ${what} enough to flip the token?`),
      node("p", {}, `Puts the other execution's value in, both ways; ${flip.folderSaid}.`, when),
      node("div", { class: "command" }, node("pre", { tabindex: "0" }, node("code", {}, text)), button),
    ];
  }

  // ---- the rounding boundary: the 16-bit line above, FP32 ULP around the boundary below.
  function picture(element) {
    const box = document.createElementNS(SVG, "svg");
    const names = ["reference", "candidate"];
    const words = `Both values beside the ${element.type} boundary ${element.boundary}; the table above holds the numbers`;
    for (const [name, value] of Object.entries({ viewBox: "0 0 640 216", role: "img", class: "number-line", "aria-label": words })) box.setAttribute(name, value);
    const draw = (tag, attributes, text) => {
      const made = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      if (text !== undefined) made.textContent = text;
      box.append(made);
    };
    const line = (y, places, format, title) => {
      const finite = places.filter(Number.isFinite);
      const reach = Math.max(...finite.map(Math.abs)) * 1.25 || 1;
      const x = (value) => 320 + (Math.max(-reach, Math.min(reach, value)) / reach) * 280;
      draw("line", { x1: 30, x2: 610, y1: y, y2: y, class: "axis" });
      draw("line", { x1: 320, x2: 320, y1: y - 50, y2: y + 4, class: "axis dashed" });
      draw("text", { x: 320, y: y - 56, class: "middle" }, title);
      return { x, format };
    };
    const relative = (value) => value - element.boundary;
    const rounded = element.roundedValues.map(relative);
    const upper = line(76, [...element.distances, ...rounded], null, `${element.type} boundary ${element.boundary}`);
    element.distances.forEach((distance, which) => {
      const [from, to, y] = [upper.x(distance), upper.x(Number.isFinite(rounded[which]) ? rounded[which] : 0), 66 - which * 18];
      draw("line", { x1: from, x2: to, y1: y, y2: y, class: `value ${names[which]}` });
      draw("circle", { cx: from, cy: y, r: 4, class: `dot ${names[which]}` });
      const way = Math.sign(to - from) || 1;
      draw("path", { d: `M${to} ${y}l${-9 * way} -5v10z`, class: `dot ${names[which]}` });
      draw("text", { x: to + 8 * way, y: y + 4, class: way > 0 ? "" : "end" }, names[which]);
    });
    for (const which of rounded[0] === rounded[1] ? [0] : [0, 1]) {
      if (!Number.isFinite(rounded[which])) continue;
      draw("line", { x1: upper.x(rounded[which]), x2: upper.x(rounded[which]), y1: 70, y2: 82, class: "axis" });
      draw("text", { x: upper.x(rounded[which]), y: 97, class: "middle" }, rounding.exact(element.roundedValues[which]));
    }
    const unit = 2 ** (Math.floor(Math.log2(Math.abs(element.boundary) || 2 ** -126)) - 23);
    const ulps = element.distances.map((distance) => distance / unit);
    const lower = line(178, [...ulps, 2], null, "zoom: FP32 ULP from the boundary");
    ulps.forEach((place, which) => {
      const y = 160 - which * 16;
      draw("line", { x1: lower.x(place), x2: lower.x(place), y1: y, y2: 178, class: `value ${names[which]}` });
      draw("circle", { cx: lower.x(place), cy: y, r: 4, class: `dot ${names[which]}` });
      const right = place >= 0 && lower.x(place) < 560;
      draw("text", { x: lower.x(place) + (right ? 8 : -8), y: y + 4, class: right ? "" : "end" }, names[which]);
      if (which === 0 || place !== ulps[0]) draw("text", { x: lower.x(place), y: 198, class: "middle" }, `${place > 0 ? "+" : ""}${Number(place.toPrecision(6)).toLocaleString("en")}`);
    });
    return box;
  }

  function boundaryOf(element) {
    if (element.cached) return [];
    if (element.boundary === null) {
      const why = data.rounded === "float32" ? "nothing was rounded" : "one of the values is not finite";
      return [node("h4", {}, "Rounding boundary"), node("p", {}, `There is none to measure from: ${why}.`)];
    }
    return [node("h4", {}, `Rounding boundary of ${nameOf(element)}`), picture(element)];
  }

  function counts(map, found) {
    const row = map.rows[found.row];
    const { i } = found;
    if (map.classes[i] <= 0) return map.classes[i] === 0 ? "All bits agree." : "Nothing was recorded here in both executions.";
    if (row.kind === "module") return "Only digests of this output were kept: its bits differ, by how much is not known.";
    const many = row.kind === "shrink" ? `${map.surviving[i].toLocaleString("en")} surviving` : `${map.surviving[i].toLocaleString("en")} differing elements`;
    return `${many}; max |difference| ${Number(map.magnitudes[i].toPrecision(6))}; up to ${map.ulps[i].toLocaleString("en")} ULP.`;
  }

  function fill(found) {
    const map = heatmap.current();
    const row = map.rows[found.row];
    const elements = elementsOf(map, found);
    const chosen = elements.find((element) => element.code === state.element) || null;
    const unit = state.phase === "prefill" ? "token position" : "step";
    const column = map.pooled[1] > 1 ? String(found.number) : map.names[Math.floor(found.at / map.pooled[1])];
    const origin = data.origins[map.origins[found.i]];
    const parts = [
      node("h3", { tabindex: "-1" }, node("bdi", {}, `${row.name}, ${unit} ${column}`)),
      node("p", {}, node("strong", {}, data.classes[map.classes[found.i]] + (origin ? `, ${origin}` : "")), `. ${counts(map, found)} ${originText(map, found)}`),
    ];
    if (elements.length) {
      const all = row.kind === "shrink" && map.origins[found.i] === 1 && map.surviving[found.i] > 0;
      const kept = all ? "All differing coordinates of this root" : "The largest differences, surviving ones first";
      parts.push(node("p", {}, `${kept}. Choose one to see its rounding boundary and to test it alone.`));
      parts.push(table(elements, chosen ? chosen.code : null, (code) => {
        state.element = code;
        state.write();
        fill(found);
        const again = panel.querySelectorAll("tbody button")[elements.findIndex((element) => element.code === (code ?? chosen?.code))];
        if (again) again.focus();
      }));
    } else if (map.classes[found.i] > 0 && map.classes[found.i] < 3 && row.kind !== "module") {
      parts.push(node("p", {}, map.elements && map.elements.left_out
        ? `The values of this cell are not on this page, whose size is bounded (${map.elements.left_out.toLocaleString("en")} values were left out, the smallest first); the traces hold them.`
        : "The values of this cell were not kept with the comparison; the traces hold them."));
    }
    if (chosen) parts.push(...boundaryOf(chosen));
    if (map.classes[found.i] > 0) parts.push(...test(map, found, chosen));
    const shut = node("button", { type: "button", class: "close", "aria-label": "Close this cell" }, "×");
    shut.addEventListener("click", () => {
      Object.assign(state, { cell: null, element: null });
      state.write();
      panel.hidden = true;
      field.focus();
    });
    panel.replaceChildren(shut, ...parts);
    panel.hidden = false;
  }

  return { open, follow };
})();

// ---- the switches, and the address: what is chosen here is written there, and read back when it changes.
(() => {
  "use strict";
  if (!flip.heatmap) return;
  const { state } = flip;
  const inputs = [...document.querySelectorAll(".controls input")];

  function show() {
    for (const input of inputs) {
      if (input.name === "kind") input.checked = state.kinds.includes(input.value);
      else input.checked = state[input.name] === input.value;
    }
  }

  for (const input of inputs) {
    input.addEventListener("change", () => {
      if (input.name === "kind") {
        state.kinds = inputs.filter((one) => one.name === "kind" && one.checked).map((one) => one.value);
      } else state[input.name] = input.value;
      if (input.name === "phase") Object.assign(state, { cell: null, element: null, x: null, y: null });
      if (input.name === "kind" || input.name === "group") state.y = null;
      state.write();
      flip.heatmap.draw();
    });
  }
  document.getElementById("reset").addEventListener("click", () => {
    Object.assign(state, { x: null, y: null });
    state.write();
    flip.heatmap.draw();
  });
  window.addEventListener("hashchange", () => {
    if (!window.location.hash.includes("=")) return;
    state.read();
    show();
    flip.heatmap.draw();
  });
  show();
})();
