// Lets people walk through the propagation graph by mouse and keyboard. report.js draws the picture itself.
(() => {
  "use strict";
  const picture = document.getElementById("propagation");
  if (!picture) return;
  const graph = JSON.parse(document.getElementById("report-data").textContent)["propagation-graph"];
  const scroll = document.getElementById("propagation-scroll");
  const told = document.getElementById("propagation-node");
  const next = new Map();
  const before = new Map();
  for (const [source, target] of graph.edges) {
    if (!next.has(source)) next.set(source, []);
    if (!before.has(target)) before.set(target, []);
    next.get(source).push(target);
    before.get(target).push(source);
  }
  const onPath = new Set(graph.path);
  let current = -1;

  function tell(number, follow) {
    current = number;
    told.textContent = graph.lines[number].join("\n");
    const layout = picture._fullLayout;
    if (!layout || !layout.xaxis) return;
    const [x, y] = graph.places[number];
    let ring = picture.querySelector(".node-ring");
    if (!ring) {
      ring = document.createElement("div");
      ring.className = "node-ring";
      picture.append(ring);
    }
    const left = layout.xaxis._offset + layout.xaxis.d2p(x);
    ring.style.left = `${left - 12}px`;
    ring.style.top = `${layout.yaxis._offset + layout.yaxis.d2p(y) - 12}px`;
    const seen = scroll.scrollLeft;
    if (follow && (left < seen + 40 || left > seen + scroll.clientWidth - 40)) scroll.scrollLeft = left - scroll.clientWidth / 2;
  }

  // The neighbour that keeps to the bold way, else the first.
  function along(neighbours) {
    const found = (neighbours.get(current) || []);
    return found.find((number) => onPath.has(number)) ?? found[0];
  }

  // The nearest node above or below, those of the same column first.
  function beside(direction) {
    const [x, y] = graph.places[current];
    let best;
    let least = Infinity;
    graph.places.forEach(([ox, oy], number) => {
      const down = (oy - y) * direction;
      const far = down + 8 * Math.abs(ox - x);
      if (down > 0.01 && far < least) { least = far; best = number; }
    });
    return best;
  }

  scroll.addEventListener("keydown", (event) => {
    const moves = {
      ArrowRight: () => along(next), ArrowLeft: () => along(before),
      ArrowDown: () => beside(1), ArrowUp: () => beside(-1),
      Home: () => graph.path[0] ?? 0, End: () => graph.path[graph.path.length - 1] ?? graph.lines.length - 1,
    };
    if (!Object.hasOwn(moves, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const wanted = current < 0 ? graph.path[0] ?? 0 : moves[event.key]();
    if (wanted !== undefined) tell(wanted, true);
  });

  const drawn = setInterval(() => {
    if (!picture.on) return;
    clearInterval(drawn);
    for (const name of ["plotly_hover", "plotly_click"]) {
      picture.on(name, (event) => {
        const point = event.points.find((one) => one.customdata !== undefined);
        if (point) tell(point.customdata, false);
      });
    }
    picture.on("plotly_afterplot", () => { if (current >= 0) tell(current, false); });
  }, 50);
})();
