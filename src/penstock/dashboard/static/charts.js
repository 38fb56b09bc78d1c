"use strict";
/* Every chart of the page, in one style. An empty chart shows the reason. */

const Charts = {

  colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  },

  palette() {
    return ["blue", "orange", "green", "purple", "red", "sky", "grey"].map(Charts.colour);
  },

  /** Calls `act` with the x and the y of a clicked point. */
  clicked(node, act) {
    node.onPointClicked = act;
    if (!node.dataset.drawn || node.dataset.clickable) return;
    node.dataset.clickable = "yes";
    node.on("plotly_click", (event) => node.onPointClicked(event.points[0].x, event.points[0].y));
  },

  /** Seconds since the start, in the unit that suits their range. */
  elapsed(began, latest) {
    const range = Math.max(1, latest - began);
    const [unit, size] = range < 300 ? ["s", 1] : range < 4 * 3600 ? ["min", 60] : ["h", 3600];
    const words = window.innerWidth < 600 ? "time" : "time since the start";
    return { title: `${words} (${unit})`, of: (xs) => xs.map((x) => (x - began) / size) };
  },

  /** A titled container for a chart inside `parent`. */
  place(parent, key, title) {
    return Dom.keep(parent, key, () => Dom.el("div", {}, Dom.el("h3", {}, title), Dom.el("div", { class: "chart" }))).lastChild;
  },

  draw(node, traces, { x = "", y = "", height = 220, empty = "Nothing has been recorded yet.", layout = {} } = {}) {
    const filled = traces.filter((trace) => trace.x.length);
    if (!filled.length) {
      if (node.dataset.drawn) { Plotly.purge(node); delete node.dataset.drawn; delete node.dataset.clickable; }
      node.replaceChildren(Dom.el("div", { class: "empty", style: `min-height: ${height - 40}px` }, empty));
      return;
    }
    if (!node.dataset.drawn) {
      node.replaceChildren();
      Charts.widths.observe(node);
    }
    node.dataset.drawn = "yes";
    const drawn = Charts.plain({ filled, layout: Charts.layout(x, y, height, filled, layout) });
    Plotly.react(node, drawn.filled, drawn.layout, { displayModeBar: false });
  },

  /** The same with every text escaped: Plotly draws markup and links in texts, and names come from a run. */
  plain(value) {
    if (typeof value === "string") return value.replace(/&/g, "&amp;").replace(/</g, "&lt;");
    if (Array.isArray(value)) return value.map(Charts.plain);
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, Charts.plain(one)]));
  },

  /** A chart is as wide as its container, also after siblings are added. */
  widths: new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.dataset.drawn && target.isConnected) Plotly.Plots.resize(target);
  }),

  layout(x, y, height, traces, more) {
    const [ink, faint, line] = ["ink", "faint", "line"].map(Charts.colour);
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { color: faint, size: 11 }, automargin: true };
    const titled = (text) => ({ ...axis, title: { text, font: { size: 11, color: faint }, standoff: 8 } });
    const named = traces.filter((trace) => trace.showlegend !== false && trace.name).length;
    return {
      height, margin: { l: 44, r: 10, t: 6, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", color: ink, size: 12 }, hovermode: "x unified", uirevision: "kept",
      hoverlabel: { bgcolor: Charts.colour("card"), bordercolor: line, font: { color: ink } },
      showlegend: named > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11, color: faint } },
      ...more,
      xaxis: { ...titled(x), showgrid: false, ...more.xaxis }, yaxis: { ...titled(y), rangemode: "tozero", ...more.yaxis },
    };
  },

  line(curve, name, colour, more = {}) {
    return { x: curve.x, y: curve.y, name, mode: curve.x.length > 1 ? "lines" : "markers", type: "scatter",
      line: { color: colour, width: 1.8, ...more.line }, marker: { color: colour }, hovertemplate: "%{y:.4g}", ...more };
  },

  /** A shaded band between two curves over the same x. */
  band(low, high, name) {
    const edge = { mode: "lines", type: "scatter", line: { width: 0 }, hoverinfo: "skip" };
    return [
      { ...edge, x: low.x, y: low.y, showlegend: false },
      { ...edge, x: high.x, y: high.y, fill: "tonexty", fillcolor: Charts.colour("band"), name },
    ];
  },

  nth(index) {
    const palette = Charts.palette();
    return palette[index % palette.length];
  },

  /** The line of the n-th curve: after all colours are used, they repeat with another dash. */
  pen(index) {
    return { color: Charts.nth(index), width: 1.8, dash: ["solid", "dash", "dot", "dashdot"][Math.floor(index / Charts.palette().length) % 4] };
  },

  /** Curves over time, each with its own pen. */
  overTime(node, curves, time, options) {
    const traces = Object.entries(curves).filter(([, curve]) => curve.x.length).map(([name, curve], index) =>
      Charts.line({ x: time.of(curve.x), y: curve.y }, name, Charts.nth(index), { ...options.trace, line: { ...Charts.pen(index), ...options.trace?.line } }));
    Charts.draw(node, traces, { x: time.title, ...options });
  },

  stacked(node, curves, time, options) {
    Charts.overTime(node, curves, time, { ...options, trace: { stackgroup: "all", line: { width: 0.5 } } });
  },

  bySteps(node, curves, options) {
    const traces = Object.entries(curves).map(([name, curve], index) =>
      Charts.line(curve, name, Charts.nth(index), { ...options.trace, line: { ...Charts.pen(index), ...options.trace?.line } }));
    Charts.draw(node, traces, { x: "optimiser step", ...options });
  },

  reward(node, reward, height = 300) {
    const blue = Charts.colour("blue");
    const traces = [
      ...Charts.band(reward.low, reward.high, "samples: 10th to 90th percentile"),
      Charts.line(reward.steps, "each step", blue, { line: { width: 1, color: Charts.colour("sky") }, opacity: 0.55 }),
      Charts.line(reward.smooth, "smoothed", blue, { line: { width: 2.4, color: blue } }),
      ...Object.entries(reward.evaluations).map(([name, curve], index) =>
        Charts.line(curve, name, "", { cliponaxis: false, error_y: { type: "data", array: curve.error, thickness: 1, width: 3, color: Charts.colour("red") }, mode: "markers+lines", line: { dash: "dot", width: 1, color: Charts.colour("red") },
          marker: { symbol: ["diamond", "square", "circle"][index % 3], size: 9, color: Charts.colour("red") } })),
    ];
    Charts.draw(node, traces.filter((trace) => trace.x.length), {
      x: "optimiser step", y: "mean reward", height, empty: "No step has been trained yet: the curve begins with the first.",
      layout: { xaxis: { rangemode: "nonnegative" } } });
  },
};
