// Draws the report's pictures from the JSON in #report-data. Texts reach the page as textContent only; what plotly
// shows as a label was escaped for plotly when the page was written.
(() => {
  "use strict";
  document.documentElement.classList.add("js");
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const darkQuery = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    displaylogo: false,
    responsive: true,
    // Named one by one: plotly's own set has a button that sends the chart, prompt texts included, to a server.
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d"], ["zoom2d", "pan2d"], ["toImage"]],
    showSendToCloud: false,
    plotlyServerURL: "",
    toImageButtonOptions: { format: "svg" },
  };
  const EQUAL = 0;
  const NOT_OBSERVED = -1;
  const CELL_PIXELS = 2;
  let printing = false;

  const ARRAYS = {
    int8: Int8Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array,
    float32: Float32Array, float64: Float64Array,
  };

  function unpack(packed) {
    const raw = atob(packed.base64);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
    return new ARRAYS[packed.dtype](bytes.buffer);
  }

  for (const map of Object.values(data.heatmaps)) {
    for (const name of ["classes", "magnitudes", "ulps", "origins", "surviving"]) map[name] = unpack(map[name]);
  }

  const isDark = () => darkQuery.matches && !printing;

  // A copy of a figure in the colours of the theme.
  function themed(figure) {
    const text = JSON.stringify(figure, (key, value) =>
      isDark() && typeof value === "string" && Object.hasOwn(data.dark, value) ? data.dark[value] : value);
    const copy = JSON.parse(text);
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--text").trim();
    const line = style.getPropertyValue("--line").trim();
    copy.layout.font = { ...(copy.layout.font || {}), color: ink, family: "system-ui, DejaVu Sans, sans-serif" };
    for (const [key, axis] of Object.entries(copy.layout)) {
      if (/^[xy]axis/.test(key)) Object.assign(axis, { linecolor: line, tickcolor: line, gridcolor: line });
    }
    copy.layout.hoverlabel = {
      bgcolor: style.getPropertyValue("--panel").trim(), font: { color: ink }, bordercolor: line,
    };
    copy.layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink, orientation: "v" };
    return copy;
  }

  // ---- heatmap
  const heat = document.getElementById("heatmap");
  const tip = document.getElementById("tip");
  const cell = document.getElementById("cell");
  const fit = document.getElementById("fit");
  const state = { phase: Object.keys(data.heatmaps)[0], colour: "class", rowPool: 0, columnPool: 0 };

  // Not observed outranks equal: a merged cell is equal only if all of it is.
  const badness = (value) => (value === EQUAL ? -2 : value);

  // The worst cell among the merged ones: [row, column]; ties go to the larger magnitude.
  function worstOf(map, row, column, rowPool, columnPool) {
    const [rows, columns] = map.shape;
    let best = -1;
    for (let r = row * rowPool; r < Math.min(rows, (row + 1) * rowPool); r += 1) {
      for (let c = column * columnPool; c < Math.min(columns, (column + 1) * columnPool); c += 1) {
        const i = r * columns + c;
        if (best < 0) { best = i; continue; }
        const gain = badness(map.classes[i]) - badness(map.classes[best]);
        if (gain > 0 || (gain === 0 && map.magnitudes[i] > map.magnitudes[best])) best = i;
      }
    }
    return best;
  }

  function values(map, rowPool, columnPool) {
    const [rows, columns] = map.shape;
    const classes = [];
    const magnitudes = [];
    for (let row = 0; row < Math.ceil(rows / rowPool); row += 1) {
      const classLine = [];
      const magnitudeLine = [];
      for (let column = 0; column < Math.ceil(columns / columnPool); column += 1) {
        const i = rowPool * columnPool === 1 ? row * columns + column : worstOf(map, row, column, rowPool, columnPool);
        const label = map.classes[i];
        const size = map.magnitudes[i];
        classLine.push(label === NOT_OBSERVED ? null : label);
        magnitudeLine.push(size > 0 && Number.isFinite(size) ? Math.log10(size) : null);
      }
      classes.push(classLine);
      magnitudes.push(magnitudeLine);
    }
    return { classes, magnitudes };
  }

  // The outline of open cells, as heatmap.unseen_outline makes it: x and y with gaps between rectangles.
  function hatchOutline(classes, rowPool, columnPool) {
    const x = [];
    const y = [];
    const running = new Map();
    for (let row = 0; row <= classes.length; row += 1) {
      const line = classes[row] || [];
      const runs = new Set();
      let start = -1;
      for (let column = 0; column <= line.length; column += 1) {
        const open = column < line.length && line[column] === null;
        if (open && start < 0) start = column;
        if (!open && start >= 0) { runs.add(`${start} ${column}`); start = -1; }
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

  function ranges() {
    const layout = heat._fullLayout;
    const [rows, columns] = data.heatmaps[state.phase].shape;
    const whole = { x: [-0.5, columns - 0.5], y: [rows - 0.5, -0.5] };
    return layout && state.drawn === state.phase ? { x: layout.xaxis.range, y: layout.yaxis.range } : whole;
  }

  function drawHeatmap() {
    const map = data.heatmaps[state.phase];
    const [rows, columns] = map.shape;
    const figure = themed(map.figure);
    const layout = figure.layout;
    const range = ranges();
    const narrow = heat.clientWidth < 620;
    layout.margin.l = narrow ? 104 : 130;
    layout.margin.r = narrow ? 8 : 36;
    layout.margin.t = state.colour === "magnitude" ? 92 : 26;
    const width = Math.max(80, heat.clientWidth - layout.margin.l - layout.margin.r);
    const height = layout.height - layout.margin.t - layout.margin.b;
    const seen = Math.max(1, Math.abs(range.x[1] - range.x[0]));
    const seenRows = Math.max(1, Math.abs(range.y[1] - range.y[0]));
    state.columnPool = Math.max(1, Math.ceil((seen * CELL_PIXELS) / width));
    state.rowPool = Math.max(1, Math.ceil((seenRows * CELL_PIXELS) / height));
    const { rowPool, columnPool } = state;
    const drawn = values(map, rowPool, columnPool);
    const place = { x0: (columnPool - 1) / 2, dx: columnPool, y0: (rowPool - 1) / 2, dy: rowPool };
    Object.assign(figure.data[0], hatchOutline(drawn.classes, rowPool, columnPool));
    Object.assign(figure.data[1], place, { z: drawn.classes, hoverinfo: "none" });
    Object.assign(figure.data[2], place, { z: drawn.magnitudes, hoverinfo: "none", visible: state.colour === "magnitude" });
    if (state.colour === "magnitude") {
      // Below the magnitudes only equal and structural cells keep their colour; a difference without a magnitude
      // (sign of zero, NaN) is black or white.
      for (let i = 2; i < 6; i += 1) figure.data[1].colorscale[i][1] = isDark() ? "#ffffff" : "#111111";
    }
    figure.data[3].showlegend = false;
    layout.showlegend = false;
    layout.xaxis.range = range.x;
    layout.yaxis.range = range.y;
    const stride = Math.max(1, Math.ceil((seen * 13) / width));
    layout.xaxis.tickvals = [];
    for (let i = 0; i < columns; i += stride) layout.xaxis.tickvals.push(i);
    layout.xaxis.ticktext = layout.xaxis.tickvals.map((i) => map.labels[i]);
    fit.textContent = rowPool * columnPool > 1
      ? `Drawn at this size, each cell shows the worst of ${rowPool} × ${columnPool}; zoom in to see them apart.` : "";
    for (const badge of document.querySelectorAll(".badge[data-phase]")) badge.hidden = badge.dataset.phase !== state.phase;
    state.drawn = state.phase;
    heat.dataset.phase = state.phase;
    heat.dataset.colour = state.colour;
    document.getElementById("key").dataset.colour = state.colour;
    if (narrow) Object.assign(figure.data[2].colorbar, { len: 0.95, nticks: 5 });
    return Plotly.react(heat, figure.data, layout, { ...config, displayModeBar: narrow ? false : "hover" });
  }

  function describe(point) {
    const map = data.heatmaps[state.phase];
    const columns = map.shape[1];
    const [row, column] = point.pointIndex || point.pointNumber;
    const i = worstOf(map, row, column, state.rowPool, state.columnPool);
    const label = map.classes[i];
    const unit = state.phase === "prefill" ? "token position" : "step";
    const lines = [map.rows[Math.floor(i / columns)], `${unit} ${map.columns[i % columns]}`];
    const origin = data.origins[map.origins[i]];
    lines.push(data.classes[label] + (origin ? `, ${origin}` : ""));
    if (label > EQUAL) {
      const ulps = map.ulps[i];
      lines.push(`max |difference| ${Number(map.magnitudes[i].toPrecision(6))}, up to ${ulps.toLocaleString("en")} ULP`);
      if (map.surviving[i]) lines.push(`${map.surviving[i].toLocaleString("en")} surviving`);
    }
    if (state.rowPool * state.columnPool > 1 || map.pooled[0] * map.pooled[1] > 1) lines.push("(worst of the merged cells)");
    return lines.join("\n");
  }

  function heatPoint(event) {
    return event.points.find((point) => point.curveNumber === 1 || point.curveNumber === 2);
  }

  function listen() {
    heat.on("plotly_hover", (event) => {
      const point = heatPoint(event);
      if (!point) return;
      tip.textContent = describe(point);
      tip.hidden = false;
      const x = Math.min(event.event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
      const y = Math.min(event.event.clientY + 14, window.innerHeight - tip.offsetHeight - 8);
      tip.style.left = `${Math.max(4, x)}px`;
      tip.style.top = `${Math.max(4, y)}px`;
    });
    heat.on("plotly_unhover", () => { tip.hidden = true; });
    heat.on("plotly_click", (event) => {
      const point = heatPoint(event);
      if (point) cell.textContent = describe(point);
    });
    heat.on("plotly_relayout", (change) => {
      if (Object.keys(change).some((key) => /^[xy]axis\.(range|autorange)/.test(key))) {
        if (change["xaxis.autorange"] || change["yaxis.autorange"]) state.drawn = "";
        drawHeatmap();
      }
    });
  }

  // ---- all pictures
  function drawOther(name) {
    const element = document.getElementById(name);
    if (!element || !data[name]) return null;
    const figure = themed(data[name]);
    if (element.clientWidth < 620 && name === "margin") figure.layout.margin.l = 60;
    const bar = element.clientWidth < 620 || name !== "margin" ? false : "hover";
    return Plotly.react(element, figure.data, figure.layout, { ...config, displayModeBar: bar });
  }

  function drawAll() {
    const drawing = ["margin", "boundary", "propagation", "cause-boundary", "cause-margins"].map(drawOther);
    if (heat) drawing.push(drawHeatmap());
    return Promise.all(drawing);
  }

  drawAll().then(() => {
    if (heat) listen();
    document.documentElement.dataset.drawn = "yes";
  });

  for (const input of document.querySelectorAll(".controls input")) {
    input.addEventListener("change", () => {
      state[input.name] = input.value;
      drawHeatmap();
    });
  }
  darkQuery.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => { printing = true; drawAll(); });
  window.addEventListener("afterprint", () => { printing = false; drawAll(); });
  let settled = 0;
  window.addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(drawAll, 150);
  });
})();
