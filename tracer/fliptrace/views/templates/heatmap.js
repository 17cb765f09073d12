// The heatmap with the lane below it: which rows are shown, how cells are merged and coloured, hovering and zooming.
flip.heatmap = (() => {
  "use strict";
  const { data, state } = flip;
  const heat = document.getElementById("heatmap");
  if (!heat) return null;
  const tip = document.getElementById("tip");
  const fit = document.getElementById("fit");
  const key = document.getElementById("key");
  const EQUAL = 0;
  const NOT_OBSERVED = -1;
  const [CELL_PIXELS, LANE, LABELLED_ROWS, PRINT_HEIGHT] = [2, 92, 80, 600];
  // Codes of origins in the data -> added here, inherited, not separable.
  const ORIGIN_GROUPS = [0, 1, 2, 3, 3];
  const FILTERS = { added: 1, inherited: 2, unknown: 3 };
  let view = null;
  let busy = false;

  for (const map of Object.values(data.heatmaps)) {
    for (const name of ["classes", "magnitudes", "ulps", "origins", "surviving", "inherited", "added", "places"]) map[name] = flip.unpack(map[name]);
    const found = map.elements;
    if (found) for (const name of ["cells", "indices", "reference", "candidate", "positions"]) found[name] = flip.unpack(found[name]);
  }
  state.read();

  const current = () => data.heatmaps[state.phase];

  // ---- rows: those of the chosen kinds, one per layer where they are grouped; several embedded ones may be one row.
  function rowsOf(map) {
    const byPlace = [];
    const layers = new Map();
    for (let at = 0; at < map.shape[0]; at += 1) {
      const rows = map.rows.slice(at * map.pooled[0], (at + 1) * map.pooled[0]);
      const kept = rows.filter((row) => state.kinds.includes(row.kind));
      if (!kept.length) continue;
      const [row, last] = [kept[0], kept[kept.length - 1]];
      const merged = rows.length > 1 ? ` … ${last.name}` : "";
      const own = { members: [at], layer: row.layer, name: row.name + merged, short: row.short, number: at };
      if (state.group !== "layer" || row.layer === null) { byPlace.push(own); continue; }
      if (!layers.has(row.layer)) {
        layers.set(row.layer, { ...own, members: [], name: `layer ${row.layer}`, short: `layer ${row.layer}` });
        byPlace.push(layers.get(row.layer));
      }
      layers.get(row.layer).members.push(at);
    }
    return byPlace;
  }

  const separated = (map, i) => Boolean(map.added) && Number.isFinite(map.added[i]);
  const originOf = (map, i) => {
    if (map.classes[i] <= EQUAL) return 0;
    const known = map.origins[i] ? ORIGIN_GROUPS[map.origins[i]] : 3;
    if (known === 1 || !separated(map, i)) return known;
    return map.added[i] > map.inherited[i] ? 1 : 2;
  };

  const hidden = (map, i) => state.origin !== "all" && map.classes[i] > EQUAL && originOf(map, i) !== FILTERS[state.origin];

  // Not observed outranks equal, then what the filter leaves out, then by class: a merged cell is equal only if all of it is.
  const badness = (map, i) => {
    const label = map.classes[i];
    if (label === EQUAL) return -2;
    return hidden(map, i) ? -0.5 : label;
  };

  // Of merged cells the worst; ties go to the larger magnitude.
  function worstOf(row, column) {
    const { map, rows, rowPool, columnPool } = view;
    const columns = map.shape[1];
    let best = -1;
    for (let r = row * rowPool; r < Math.min(rows.length, (row + 1) * rowPool); r += 1) {
      for (const member of rows[r].members) {
        for (let c = column * columnPool; c < Math.min(columns, (column + 1) * columnPool); c += 1) {
          const i = member * columns + c;
          if (best < 0) { best = i; continue; }
          const gain = badness(map, i) - badness(map, best);
          if (gain > 0 || (gain === 0 && map.magnitudes[i] > map.magnitudes[best])) best = i;
        }
      }
    }
    return best;
  }

  function matrices() {
    const { map, rows, rowPool, columnPool } = view;
    const drawn = { base: [], shade: [], open: [] };
    for (let row = 0; row < Math.ceil(rows.length / rowPool); row += 1) {
      const lines = { base: [], shade: [], open: [] };
      for (let column = 0; column < Math.ceil(map.shape[1] / columnPool); column += 1) {
        const i = worstOf(row, column);
        const label = map.classes[i];
        const away = label > EQUAL && hidden(map, i);
        const size = state.colour === "ulp" ? map.ulps[i] : map.magnitudes[i];
        lines.open.push(label === NOT_OBSERVED);
        lines.base.push(label === NOT_OBSERVED || away ? null : state.colour === "origin" ? originOf(map, i) : label);
        lines.shade.push(!away && size > 0 && Number.isFinite(size) ? Math.log10(size) : null);
      }
      for (const name of Object.keys(drawn)) drawn[name].push(lines[name]);
    }
    return drawn;
  }

  // The outline of cells that were not observed, as heatmap.unseen_outline makes it: x and y with gaps between rectangles.
  function hatchOutline(open) {
    const { rowPool, columnPool } = view;
    const [x, y] = [[], []];
    const running = new Map();
    for (let row = 0; row <= open.length; row += 1) {
      const line = open[row] || [];
      const runs = new Set();
      let start = -1;
      for (let column = 0; column <= line.length; column += 1) {
        if (line[column] && start < 0) start = column;
        if (!line[column] && start >= 0) { runs.add(`${start} ${column}`); start = -1; }
      }
      for (const [run, top] of [...running]) {
        if (runs.has(run)) continue;
        running.delete(run);
        const [left, right] = run.split(" ").map((edge) => Number(edge) * columnPool - 0.5);
        const [high, low] = [top * rowPool - 0.5, row * rowPool - 0.5];
        x.push(left, right, right, left, left, null);
        y.push(high, high, low, low, high, null);
      }
      for (const run of runs) if (!running.has(run)) running.set(run, row);
    }
    return { x, y };
  }

  function scale(names) {
    const stops = [];
    names.forEach((name, i) => stops.push([i / names.length, flip.colour(name)], [(i + 1) / names.length, flip.colour(name)]));
    return stops;
  }

  function shades(drawn, narrow) {
    let [low, high] = [Infinity, -Infinity];
    for (const line of drawn.shade) for (const value of line) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    if (low === Infinity) return { zmin: -1, zmax: 0, showscale: false };
    low = Math.floor(low);
    high = Math.max(Math.ceil(high), low + 1);
    const ticks = [];
    for (let value = low; value <= high; value += Math.max(1, Math.ceil((high - low) / (narrow ? 4 : 8)))) ticks.push(value);
    return {
      zmin: low, zmax: high, showscale: true,
      colorbar: {
        title: { text: state.colour === "ulp" ? "largest distance, ULP" : "max |difference|", side: "top", font: { size: 11 } },
        orientation: "h", thickness: 10, ypad: 22, len: narrow ? 0.95 : 0.6, x: 0, xanchor: "left", y: 1, yanchor: "bottom",
        tickvals: ticks, ticktext: ticks.map((value) => `1e${value}`),
      },
    };
  }

  // ---- the lane: margins of both executions, ties and the flip, on the heatmap's columns.
  function laneTraces(lane) {
    const ink = { reference: flip.colour("reference"), candidate: flip.colour("surviving") };
    const traces = ["reference", "candidate"].map((name) => ({
      type: "scatter", mode: lane.x.length > 150 ? "lines" : "lines+markers", name, x: lane.x, xaxis: "x", yaxis: "y2",
      y: lane[name].map((value) => (value > 0 ? value : null)), hoverinfo: "text",
      text: lane[name].map((value, i) => `${name}, step ${lane.steps[i]}: margin ${value === null ? "not a number" : Number(value.toPrecision(6))}`),
      line: { color: ink[name], width: 1.5, dash: name === "candidate" ? "dot" : "solid" },
      marker: { size: 5, symbol: name === "candidate" ? "x" : "circle" }, showlegend: false,
    }));
    const ties = [];
    lane.ties.forEach((tied, i) => tied.forEach((count, which) => { if (count > 1) ties.push([i, which, count]); }));
    traces.push({
      type: "scatter", mode: "markers", name: "tie", x: ties.map(([i]) => lane.x[i]), y: ties.map(() => lane.range[0] / 4),
      xaxis: "x", yaxis: "y2", hoverinfo: "text", showlegend: false, marker: { symbol: "diamond", size: 9, color: flip.colour("tie") },
      text: ties.map(([i, which, count]) => `tie in the ${which ? "candidate" : "reference"}, step ${lane.steps[i]}: ${count} tokens`),
    });
    return traces;
  }

  function figure() {
    const { map, rows } = view;
    const columns = map.shape[1];
    const width = flip.widthOf(heat);
    const narrow = width < 620;
    const shaded = state.colour === "magnitude" || state.colour === "ulp";
    const room = rows.length <= LABELLED_ROWS ? 14 : Math.max(2, Math.min(6, 1400 / rows.length));
    const wanted = flip.isPrinting() ? Math.min(room, PRINT_HEIGHT / rows.length) : room; // on one sheet
    const body = Math.max(70, Math.round(rows.length * wanted));
    const margin = { l: narrow ? 104 : 140, r: narrow ? 8 : 36, t: shaded ? 74 : 24, b: 104 };
    const lane = map.lane;
    const plot = body + (lane ? LANE + 14 : 0);
    const seen = state.x || [-0.5, columns - 0.5];
    const seenRows = state.y || [rows.length - 0.5, -0.5];
    const inner = Math.max(80, width - margin.l - margin.r);
    view.columnPool = Math.max(1, Math.ceil((Math.abs(seen[1] - seen[0]) * CELL_PIXELS) / inner));
    view.rowPool = Math.max(1, Math.ceil((Math.abs(seenRows[1] - seenRows[0]) * CELL_PIXELS) / body));
    const { rowPool, columnPool } = view;
    const drawn = matrices();
    const place = { x0: (columnPool - 1) / 2, dx: columnPool, y0: (rowPool - 1) / 2, dy: rowPool, hoverinfo: "none" };
    const bare = flip.isDark() ? "#ffffff" : "#111111";
    const classScale = scale(["equal", "latent", "surviving", "structural"]);
    // Below the magnitudes only equal and structural cells keep their colour.
    if (shaded) for (let i = 2; i < 6; i += 1) classScale[i][1] = bare;
    const traces = [
      {
        type: "scatter", mode: "lines", fill: "toself", line: { width: 0 }, fillcolor: "rgba(0,0,0,0)", hoverinfo: "skip", showlegend: false,
        fillpattern: { shape: "/", size: 6, solidity: 0.25, fgcolor: flip.colour("hatch"), bgcolor: "rgba(0,0,0,0)" }, ...hatchOutline(drawn.open),
      },
      {
        type: "heatmap", z: drawn.base, zmin: -0.5, zmax: 3.5, showscale: false, hoverongaps: true, ...place,
        colorscale: state.colour === "origin" ? scale(["equal", "added", "inherited", "unknown"]) : classScale,
      },
      { type: "heatmap", z: drawn.shade, visible: shaded, colorscale: "Viridis", hoverongaps: false, ...place, ...shades(drawn, narrow) },
    ];
    const rootRow = map.root ? rows.findIndex((row) => row.members.includes(map.root[0])) : -1;
    traces.push({
      type: "scatter", mode: "markers", hoverinfo: "skip", showlegend: false,
      x: rootRow < 0 ? [] : [map.root[1]], y: rootRow < 0 ? [] : [rootRow],
      marker: { symbol: "circle-open", size: 16, color: flip.colour("text"), line: { width: 2.5, color: flip.colour("text") } },
    });
    if (lane) traces.push(...laneTraces(lane));
    const stride = Math.max(1, Math.ceil((Math.abs(seen[1] - seen[0]) * 13) / inner));
    const ticks = [];
    for (let i = 0; i < columns; i += stride) ticks.push(i);
    const share = lane ? LANE / plot : 0;
    const layout = {
      height: plot + margin.t + margin.b, margin, hovermode: "closest", showlegend: false, dragmode: "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { size: 12 },
      xaxis: {
        range: [...seen], tickvals: ticks, ticktext: ticks.map((i) => map.labels[i]), tickangle: -90, tickfont: { size: 10 },
        showgrid: false, zeroline: false, ticks: "outside", anchor: lane ? "y2" : "y",
      },
      yaxis: {
        range: [...seenRows], ...rowTicks(rows), tickfont: { size: wanted < 10 && rows.length <= LABELLED_ROWS ? 7 : 10 }, showgrid: false, zeroline: false, ticks: "outside",
        domain: [lane ? (LANE + 14) / plot : 0, 1],
      },
      annotations: [{
        text: state.phase === "prefill" ? "position" : "step", xref: "paper", yref: "paper", x: 0, y: 0, xshift: -10, yshift: -8,
        xanchor: "right", yanchor: "top", showarrow: false,
      }],
      shapes: [],
    };
    if (lane) {
      const [least, most] = lane.range.map(Math.log10);
      layout.yaxis2 = {
        domain: [0, share], type: "log", range: [least - 1, most + 0.3], title: { text: "margin", font: { size: 11 }, standoff: 4 },
        tickformat: "~g", nticks: 4, zeroline: false, tickfont: { size: 10 }, fixedrange: true,
      };
      if (lane.flip !== null) {
        layout.shapes.push({ type: "line", xref: "x", yref: "paper", x0: lane.flip, x1: lane.flip, y0: 0, y1: 1, line: { color: flip.colour("text"), width: 1.5, dash: "dot" } });
        layout.annotations.push({ text: "flip", x: lane.flip, xref: "x", y: 1, yref: "paper", yanchor: "bottom", showarrow: false });
      }
    }
    return { data: traces, layout, narrow };
  }

  function rowTicks(rows) {
    if (rows.length <= LABELLED_ROWS) {
      const cut = (text) => (text.length > 22 ? `${text.slice(0, 21)}…` : text);
      return { tickvals: rows.map((_, i) => i), ticktext: rows.map((row) => label(cut(row.short))) };
    }
    const [values, texts] = [[], []];
    rows.forEach((row, i) => {
      if (row.layer !== null && (i === 0 || row.layer !== rows[i - 1].layer)) { values.push(i); texts.push(`layer ${row.layer}`); }
    });
    const stride = Math.max(1, Math.ceil(values.length / 48));
    return { tickvals: values.filter((_, i) => i % stride === 0), ticktext: texts.filter((_, i) => i % stride === 0) };
  }

  // Characters that plotly reads as markup or formula, as references that it shows.
  const label = (text) => text.replace(/[&<>$%{}\\]/g, (character) => `&#${character.charCodeAt(0)};`);

  function draw() {
    const map = current();
    view = { map, rows: rowsOf(map), rowPool: 1, columnPool: 1 };
    const made = figure();
    const themedFigure = flip.themed({ data: [], layout: made.layout }, heat);
    const { rowPool, columnPool } = view;
    const merged = rowPool * columnPool > 1 || (state.group === "layer" && view.rows.some((row) => row.members.length > 1));
    const zoom = rowPool * columnPool > 1 ? "; zoom in to see them apart" : "";
    const grouped = state.group === "layer" ? "a layer's rows" : `${rowPool} × ${columnPool}`;
    fit.textContent = merged ? `Drawn at this size, each cell shows the worst of ${rowPool * columnPool > 1 ? `${rowPool} × ${columnPool}` : grouped}${zoom}.` : "";
    for (const badge of document.querySelectorAll(".badge[data-phase]")) badge.hidden = badge.dataset.phase !== state.phase;
    key.dataset.colour = state.colour;
    key.dataset.filtered = String(state.origin !== "all");
    heat.dataset.phase = state.phase;
    heat.dataset.colour = state.colour;
    document.getElementById("no-rows").hidden = view.rows.length > 0;
    busy = true;
    const drawing = Plotly.react(heat, made.data, themedFigure.layout, { ...flip.config, displayModeBar: made.narrow || flip.isPrinting() ? false : "hover" });
    return drawing.then(() => { busy = false; heat.dataset.width = flip.widthOf(heat); listen(); if (flip.cells) flip.cells.follow(); });
  }

  // ---- what a cell says
  function pick(row, column) {
    if (!view.rows.length) return null;
    const i = worstOf(Math.floor(row / view.rowPool), Math.floor(column / view.columnPool));
    return placeIn(view.map, i);
  }

  // The grid's own row and column of an embedded cell: the worst member where several were merged.
  function placeIn(map, i) {
    const width = map.columns.length;
    const place = map.places ? map.places[i] : i;
    return { i, row: Math.floor(place / width), at: place % width, number: map.columns[place % width] };
  }

  const short = (value) => Number(value.toPrecision(6));

  function describe(found) {
    const { map } = view;
    const { i } = found;
    const columns = map.shape[1];
    const unit = state.phase === "prefill" ? "token position" : "step";
    const name = map.pooled[1] > 1 ? String(found.number) : map.names[i % columns];
    const lines = [map.rows[found.row].name, `${unit} ${name}`];
    const origin = data.origins[map.origins[i]];
    lines.push(data.classes[map.classes[i]] + (origin ? `, ${origin}` : ""));
    if (map.classes[i] > EQUAL) {
      if (map.rows[found.row].kind === "module") lines.push("only digests were kept");
      else lines.push(`max |difference| ${short(map.magnitudes[i])}, up to ${map.ulps[i].toLocaleString("en")} ULP`);
      if (separated(map, i) && map.origins[i] !== 1) lines.push(`inherited up to ${short(map.inherited[i])}, added here up to ${short(map.added[i])}`);
      if (map.surviving[i]) lines.push(`${map.surviving[i].toLocaleString("en")} ${map.rows[found.row].kind === "shrink" ? "surviving" : "differing"}`);
    }
    if (view.rowPool * view.columnPool * map.pooled[0] * map.pooled[1] > 1) lines.push("(worst of the merged cells)");
    return lines.join("\n");
  }

  const cellOf = (event) => event.points.find((point) => point.curveNumber === 1 || point.curveNumber === 2);
  const fromPoint = (point) => {
    const [row, column] = point.pointIndex || point.pointNumber;
    return [row * view.rowPool, column * view.columnPool];
  };
  let listening = false;

  function listen() {
    if (listening) return;
    listening = true;
    heat.on("plotly_hover", (event) => {
      const point = cellOf(event);
      const found = point && pick(...fromPoint(point));
      if (!found) return;
      tip.textContent = describe(found);
      tip.hidden = false;
      const x = Math.min(event.event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
      const y = Math.min(event.event.clientY + 14, window.innerHeight - tip.offsetHeight - 8);
      tip.style.left = `${Math.max(4, x)}px`;
      tip.style.top = `${Math.max(4, y)}px`;
    });
    heat.on("plotly_unhover", () => { tip.hidden = true; });
    heat.on("plotly_click", (event) => {
      const point = cellOf(event);
      if (point) flip.cells.open(...fromPoint(point));
    });
    heat.on("plotly_relayout", (change) => {
      if (busy || !Object.keys(change).some((name) => /^[xy]axis\.(range|autorange)/.test(name))) return;
      const whole = (name) => change[`${name}axis.autorange`];
      for (const name of ["x", "y"]) {
        if (whole(name)) state[name] = null;
        else if (`${name}axis.range[0]` in change) state[name] = [change[`${name}axis.range[0]`], change[`${name}axis.range[1]`]];
        else if (`${name}axis.range` in change) state[name] = [...change[`${name}axis.range`]];
      }
      const [rows, columns] = [view.rows.length, view.map.shape[1]];
      if (state.x && state.x[0] <= -0.5 && state.x[1] >= columns - 0.5) state.x = null;
      if (state.y && state.y[1] <= -0.5 && state.y[0] >= rows - 0.5) state.y = null;
      state.write();
      draw();
    });
  }

  flip.drawers.push(draw);
  return { element: heat, draw, pick, describe, placeIn, current, label, separated, view: () => view };
})();
