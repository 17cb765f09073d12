// Draws the report's pictures from the JSON in #report-data. Texts reach the page as textContent only; what plotly
// shows as a label was escaped for plotly when the page was written. The files that follow share the object `flip`.
const flip = (() => {
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
  const ARRAYS = {
    int8: Int8Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array,
    float32: Float32Array, float64: Float64Array,
  };
  // Width of the text on a sheet of A4, which the browser lays out only after it has asked for the pictures.
  const PRINT_WIDTH = 700;
  let printing = false;
  const drawers = [];

  function unpack(packed) {
    if (packed === null) return null;
    const raw = atob(packed.base64);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
    return new ARRAYS[packed.dtype](bytes.buffer);
  }

  const isDark = () => darkQuery.matches && !printing;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  // The folder of this page as a shell takes it, for commands to copy; null where the page was not opened as a file, or
  // where the name holds characters that a terminal acts upon or that no eye tells apart.
  function folderForShell() {
    if (window.location.protocol !== "file:" || window.location.host) return null;
    let folder;
    try { folder = decodeURIComponent(window.location.pathname.replace(/\/[^/]*$/, "") || "/"); } catch { return null; }
    if (/[\p{C}\p{Zl}\p{Zp}]/u.test(folder)) return null;
    return /^[\w@%+=:,./-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", "'\\''")}'`;
  }

  const folder = folderForShell();
  const pairFolder = folder ?? "PAIR_DIR";
  const folderSaid = folder === null ? "PAIR_DIR is the folder of this pair"
    : "the folder is the one in which this page lies; it must hold the pair's traces";

  const widthOf = (element) => (printing ? PRINT_WIDTH : element.clientWidth);

  // A copy of a figure in the colours of the theme.
  function themed(figure, element) {
    const text = JSON.stringify(figure, (key, value) =>
      isDark() && typeof value === "string" && Object.hasOwn(data.dark, value) ? data.dark[value] : value);
    const copy = JSON.parse(text);
    const [ink, line] = [colour("text"), colour("line")];
    copy.layout.font = { ...(copy.layout.font || {}), color: ink, family: "system-ui, DejaVu Sans, sans-serif" };
    for (const [key, axis] of Object.entries(copy.layout)) {
      if (/^[xy]axis/.test(key)) Object.assign(axis, { linecolor: line, tickcolor: line, gridcolor: line });
    }
    copy.layout.hoverlabel = { bgcolor: colour("panel"), font: { color: ink }, bordercolor: line };
    copy.layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink, orientation: "v" };
    if (printing) Object.assign(copy.layout, { width: PRINT_WIDTH, autosize: false });
    else if (element) copy.layout.autosize = true;
    return copy;
  }

  function drawOther(name) {
    const element = document.getElementById(name);
    if (!element || !data[name]) return null;
    const figure = themed(data[name], element);
    return Plotly.react(element, figure.data, figure.layout, { ...config, displayModeBar: false });
  }

  function drawAll() {
    const drawing = ["boundary", "propagation", "cause-boundary", "cause-margins"].map(drawOther);
    return Promise.all([...drawing, ...drawers.map((draw) => draw())]);
  }

  document.addEventListener("DOMContentLoaded", () => {
    for (const place of document.querySelectorAll(".pair-folder")) place.textContent = pairFolder;
    drawAll().then(() => { document.documentElement.dataset.drawn = "yes"; });
  });
  darkQuery.addEventListener("change", drawAll);
  // The browser asks for pictures while the screen's style still holds: the class brings the light colours forward.
  const printed = (now) => {
    printing = now;
    document.documentElement.classList.toggle("printing", now);
    return drawAll();
  };
  window.addEventListener("beforeprint", () => printed(true));
  window.addEventListener("afterprint", () => printed(false));
  let settled = 0;
  let lastWidth = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === lastWidth || printing) return;
    lastWidth = window.innerWidth;
    clearTimeout(settled);
    settled = setTimeout(drawAll, 150);
  });

  return { data, config, pairFolder, folderSaid, unpack, isDark, colour, widthOf, themed, drawers, isPrinting: () => printing };
})();
