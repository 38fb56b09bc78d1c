"use strict";
/* One object per view: its query, and `draw`, which draws the answer into `main` at every refresh. */

const NO_GAUGES = "No gauges yet: the controller writes them every two seconds (early versions did not).";

const Views = {
  overview: {
    title: "Overview",
    ask: () => ["overview", {}],
    draw(main, data, page) {
      if (data.journal_trouble) {
        Dom.card(main, "journal", "The journal cannot be read", data.journal_trouble);
      }
      if (data.unread_events) {
        Dom.card(main, "unread", "Another version of Penstock?", `${Words.number(data.unread_events)} events of the journal cannot be decoded; their data is missing below.`);
      }
      const cards = Dom.grid(main, "pipelines", data.pipelines.length > 1 ? "pair" : "one");
      for (const pipeline of data.pipelines) {
        const time = Charts.elapsed(data.began_at, data.latest_at);
        const card = Dom.card(cards, `pipeline ${pipeline.name}`, pipeline.name, pipeline.phase);
        drawProgress(card, pipeline, data.state.word);
        const reward = Charts.place(card, "reward", "Reward");
        Charts.reward(reward, pipeline.reward);
        Charts.clicked(reward, (step) => page.openStory(pipeline.name, "step", Math.round(step)));
        const small = Dom.grid(Dom.folded(card, "more", "More charts", data.pipelines.length > 1 && window.innerWidth <= 760), "small", "small");
        const overTime = (key, title, curve, y) =>
          Charts.overTime(Charts.place(small, key, title), { [title]: curve }, time, { y, height: 150, empty: NO_GAUGES });
        const bySteps = (key, title, curve, y) => Charts.bySteps(Charts.place(small, key, title), { [title]: curve }, { y, height: 150 });
        bySteps("length", "Mean length of a sample", pipeline.length, "tokens or steps");
        bySteps("pace", "Time per step", pipeline.step_s, "seconds");
        bySteps("staleness", "Staleness", pipeline.staleness, "versions");
        overTime("rate", "Samples trained per second", pipeline.samples_per_s, "samples/s");
        overTime("flight", "Samples in flight", pipeline.in_flight, "samples");
        overTime("workers", "Workers alive", pipeline.workers_alive, "workers");
        drawOtherMetric(small.parentNode, pipeline, page);
      }
      if (!data.pipelines.length) main.replaceChildren(Dom.empty("No pipeline can be read from the configuration of this run."));
    },
  },

  flow: {
    title: "Flow",
    perPipeline: true,
    ask: (page) => ["flow", { pipeline: page.pipeline }],
    draw(main, data, page) {
      const time = page.time;
      const stages = Dom.card(main, "stages", "What each part waits for", "seconds per sample in each stage of the ring, over the last two minutes");
      const longest = Math.max(1e-9, ...data.stages.map((stage) => stage.recent_s ?? stage.run_s));
      const rows = data.stages.flatMap((stage) => {
        const value = stage.recent_s ?? stage.run_s;
        const waiting = ["wait", "group", "buffer"].includes(stage.key);
        const fill = Dom.el("div", { class: waiting ? "fill waiting" : "fill", style: `width: ${(100 * value) / longest}%` });
        return [
          Dom.el("span", {}, stage.label),
          Dom.el("div", { class: "track", title: `${Words.seconds(stage.run_s)} over the whole run` }, fill),
          Dom.el("span", { class: "value" }, Words.seconds(value)),
        ];
      });
      const body = Dom.keep(stages, "rows", () => Dom.el("div"));
      const key = Dom.el("p", { style: "margin-top: 10px" },
        Dom.el("span", { class: "key" }, Dom.el("i"), "working"), Dom.el("span", { class: "key" }, Dom.el("i", { class: "waiting" }), "waiting"));
      body.replaceChildren(rows.length ? Dom.el("div", { class: "stages" }, ...rows) : Dom.empty("No sample has been delivered yet."), key);

      const grid = Dom.grid(main, "charts");
      Charts.stacked(Charts.place(Dom.card(grid, "states", "Where samples are"), "chart", ""), data.states, time, { y: "samples", empty: NO_GAUGES });
      Charts.overTime(Charts.place(Dom.card(grid, "throttled", "Workers throttled",
        data.throttle_engagements ? `${Words.number(data.throttle_engagements)} times so far, to bound the staleness of samples` : ""), "chart", ""),
        { throttled: data.throttled }, time, { y: "share of the time", empty: NO_GAUGES, trace: { fill: "tozeroy", line: { shape: "hv" } }, layout: { yaxis: { range: [0, 1.05] } } });
      Charts.overTime(Charts.place(Dom.card(grid, "rates", "How samples end"), "chart", ""),
        { trained: data.trained_per_s, ...prefixed("dropped: ", data.dropped_per_s) }, time, { y: "samples/s", empty: NO_GAUGES });
      drawEnded(Dom.card(grid, "ended", "How samples ended so far"), data.ended);
      Charts.bySteps(Charts.place(Dom.card(grid, "trainer", "The trainer's time per step"), "chart", ""),
        { computing: data.trainer.step_s, "waiting for its batch": data.trainer.wait_s, fetching: data.trainer.fetch_s, "waiting for devices": data.trainer.turn_s },
        { y: "seconds", empty: "No step has been trained yet." });
      Charts.overTime(Charts.place(Dom.card(grid, "curves", "The longest stages over time"), "chart", ""),
        { generating: data.stage_curves.generate ?? none, "waiting for its group": data.stage_curves.group ?? none,
          "waiting for a batch": data.stage_curves.buffer ?? none, "with the trainer": data.stage_curves.train ?? none }, time, { y: "seconds" });
    },
  },

  weights: {
    title: "Weights",
    perPipeline: true,
    ask: (page) => ["weights", { pipeline: page.pipeline }],
    draw(main, data, page) {
      const grid = Dom.grid(main, "charts");
      const bound = data.max_staleness;
      const colours = data.staleness.x.map((age) => Charts.colour(bound !== null && age > bound ? "red" : "blue"));
      Charts.draw(Charts.place(Dom.card(grid, "histogram", "How stale samples were", bound === null ? "" : `the bound is ${bound}`), "chart", ""),
        [{ x: data.staleness.x, y: data.staleness.y, type: "bar", name: "samples", marker: { color: colours }, hovertemplate: "%{y:,} samples" }],
        { x: "versions between generation and training", y: "samples", empty: "The trainer has received no batch yet.", layout: { xaxis: { dtick: 1 } } });
      Charts.bySteps(Charts.place(Dom.card(grid, "curve", "Staleness by step"), "chart", ""),
        { mean: data.staleness_mean, greatest: { x: data.staleness_max.x, y: data.staleness_max.high } }, { y: "versions" });
      const versions = { x: data.versions.map((one) => one.at), y: data.versions.map((one) => one.version) };
      const last = data.versions.at(-1);
      const kept = data.versions[0]?.version > 0 ? `; the newest ${data.versions.length}` : "";
      const published = Charts.place(Dom.card(grid, "published", "Versions published", last ? `v${last.version}, ${Words.bytes(last.size_bytes)}${kept}` : ""), "chart", "");
      Charts.overTime(published, { version: versions }, page.time, { y: "version", empty: "No weights have been published yet.", trace: { line: { shape: "hv" } } });
      Charts.clicked(published, (_, version) => page.openStory(page.pipeline, "version", version));
      Charts.overTime(Charts.place(Dom.card(grid, "pauses", "Pause of each engine at its last update"), "chart", ""),
        short(data.pauses), page.time, { y: "seconds", empty: NO_GAUGES });
      Charts.overTime(Charts.place(Dom.card(grid, "updates", "From the offer of a version to serving it"), "chart", ""),
        short(data.updates), page.time, { y: "seconds", empty: NO_GAUGES });
      const names = { weights_published_total: "published", weights_updates_total: "updates of engines", weights_skipped_versions_total: "versions skipped for a newer one",
        weights_update_failures_total: "updates that failed", weights_mismatches_total: "digests that did not match", weights_evictions_total: "replicas evicted", weights_fleet_restarts_total: "restarts of the whole fleet" };
      const rows = Object.entries(names).filter(([key]) => key in data.totals).map(([key, words]) => ({ words, count: data.totals[key] }));
      rows.unshift({ words: "from the step's end to its weights being published", count: Words.seconds(data.publish_s) },
        { words: "from publishing to a worker's first lease with them", count: Words.seconds(data.reach_s) });
      const card = Dom.card(grid, "totals", "Counted", "since the controller's last start");
      Dom.keep(card, "table", () => Dom.el("div")).replaceChildren(Dom.table(
        [{ title: "", of: (row) => row.words }, { title: "", number: true, of: (row) => (typeof row.count === "number" ? Words.number(row.count) : row.count) }], rows));
    },
  },

  loops: {
    title: "Loops",
    ask: () => ["loops", {}],
    draw(main, data, page) {
      const card = Dom.card(main, "table", "Lag of each event loop", "over its last minute; worst: since its start; wait p99: the wait of an event at a random moment");
      const columns = [{ title: "process", of: (row) => row.name }, ...["p50_s", "p90_s", "p99_s", "max_s", "wait_p99_s", "worst_s"].map((name) => ({
        title: { wait_p99_s: "wait p99", worst_s: "worst" }[name] ?? name.replace("_s", ""), number: true, of: (row) => Words.seconds(row[name]) }))];
      Dom.keep(card, "rows", () => Dom.el("div")).replaceChildren(data.processes.length ? Dom.table(columns, data.processes) : Dom.empty(NO_GAUGES));
      const chart = Dom.card(main, "chart", "The 99th percentile over time");
      const curves = Object.fromEntries(data.processes.map((one) => [one.name, { x: one.p99.x, y: one.p99.high.map((value) => value * 1e3) }]));
      Charts.overTime(Charts.place(chart, "chart", ""), short(curves), page.time,
        { y: "milliseconds late", height: 280, empty: NO_GAUGES, layout: { yaxis: { type: "log", rangemode: "normal", dtick: "D2", tickformat: "~g" } } });
      const blocked = Dom.card(main, "blocked", "What blocked an event loop", "the innermost calls first");
      Dom.keep(blocked, "lines", () => Dom.el("div")).replaceChildren(
        notes(data.blocked, "No loop was blocked for longer than lag.stall_s."));
    },
  },

  pool: {
    title: "Pool",
    ask: () => ["pool", {}],
    draw(main, data, page) {
      const card = Dom.card(main, "lanes", "Devices over time", "the last moves; colour: pipeline, pattern: activity");
      const empty = data.undecided ? "This journal does not contain the decisions of the pool." : "No device has been granted yet.";
      drawLanes(card, data, page, empty);
      const grid = Dom.grid(main, "more");
      const shares = Dom.card(grid, "shares", "How devices were used", "share of the time since the pool started");
      const doings = ["training", "scoring", "generating", "waking", "leaving", "initialising", "fenced"];
      const total = Math.max(1e-9, data.now - (data.began_at ?? data.now));
      const palette = Charts.palette();
      const traces = doings.map((doing, index) => ({ type: "bar", orientation: "h", name: doing, marker: { color: palette[index % palette.length] },
        y: data.devices.map((device) => `device ${device}`), x: data.devices.map((device) => (100 * (data.busy_s[device][doing] ?? 0)) / total), hovertemplate: "%{x:.1f} %" }))
        .filter((trace) => trace.x.some((value) => value > 0));
      Charts.draw(Charts.place(shares, "chart", ""), traces, { x: "% of the time", height: 120 + 26 * data.devices.length, empty,
        layout: { barmode: "stack", hovermode: "closest", xaxis: { range: [0, 100] }, yaxis: { autorange: "reversed" } } });
      const moves = Dom.card(grid, "moves", "Moves", "the latest first");
      Dom.keep(moves, "lines", () => Dom.el("div")).replaceChildren(notes(data.moves.map((move) => ({
        at: move.at, text: `${move.member}: ${move.what} on ${move.devices.join(", ")}` })), empty));
    },
  },

  samples: {
    title: "Samples",
    ask: (page) => ["samples", page.exported ? (page.source ? { source: page.source } : {}) : {
      source: page.source ?? "", first: String(page.first ?? 0), step: page.step ?? "", low: page.low ?? "", high: page.high ?? "" }],
    draw: (main, data, page) => Samples.draw(main, data, page),
  },

  configuration: {
    title: "Configuration",
    ask: () => ["configuration", {}],
    draw(main, data, page) {
      const card = Dom.card(main, "settings", "Configuration", "with every default; runs are compared under Runs");
      const search = Dom.keep(card, "row", () => Dom.el("div", { class: "row" },
        Dom.el("input", { type: "search", placeholder: "part of a key or value", "aria-label": "Search", oninput: () => page.refresh() }))).firstChild;
      const query = search.value.toLowerCase();
      const rows = data.rows.filter((row) => `${row.key} = ${row.value}`.toLowerCase().includes(query));
      Dom.keep(card, "table", () => Dom.el("div")).replaceChildren(rows.length ? Dom.table(
        [{ title: "key", kind: "mono", of: (row) => row.key }, { title: "value", kind: "mono", of: (row) => row.value }], rows)
        : Dom.empty(data.rows.length ? "No key or value contains this text." : "The configuration of this run cannot be read."));
    },
  },

  troubles: {
    title: "Troubles",
    ask: () => ["troubles", {}],
    draw(main, data, page) {
      const words = Dom.keep(main, "words", () => Dom.el("div", { class: "grid" }));
      words.replaceChildren(...Object.entries(data.failure_reports).map(([process, text]) =>
        Dom.el("section", { class: "card words" }, Dom.el("h3", {}, `${process}'s failure report`), Dom.el("p", { class: "mono", style: "white-space: pre-wrap; overflow-wrap: anywhere" }, text))));
      words.hidden = !words.children.length;
      const grid = Dom.grid(main, "lists");
      const remarks = Dom.card(grid, "remarks", "Messages of the controller", "stalls, evictions, members that joined or left");
      Dom.keep(remarks, "lines", () => Dom.el("div")).replaceChildren(notes(data.remarks, "The controller has sent no message yet.", (one) => ["stall", "failure"].includes(one.kind)));
      const warnings = Dom.card(grid, "warnings", "Warnings of all processes", "including restarts");
      Dom.keep(warnings, "lines", () => Dom.el("div")).replaceChildren(notes(
        data.warnings.map((one) => ({ ...one, text: `${one.process}: ${one.text}` })), "No process has logged a warning.", (one) => one.level !== "WARNING" || one.kind === "restart"));
      drawLog(main, data.logs, page);
    },
  },
};

const none = { x: [], y: [] };

function prefixed(prefix, curves) {
  return Object.fromEntries(Object.entries(curves).map(([name, curve]) => [prefix + name, curve]));
}

/** Processes by their short names, without the pipeline before the slash. */
function short(curves) {
  return Object.fromEntries(Object.entries(curves).map(([name, curve]) => [name.slice(name.indexOf("/") + 1), curve]));
}

function notes(lines, empty, isGrave = () => false) {
  if (!lines.length) return Dom.empty(empty);
  return Dom.el("ul", { class: "lines" }, ...lines.map((one) => Dom.el("li", {},
    Dom.el("time", { title: Words.day(one.at) }, Words.clock(one.at)), Dom.el("span", { class: isGrave(one) ? "grave" : null }, one.text))));
}

function drawProgress(card, pipeline, word) {
  const isLive = word === "running" && pipeline.phase !== "complete";
  const figures = pipeline.figures;
  const staleness = `${Words.number(figures.staleness, 2)}${figures.max_staleness === null ? "" : ` of ${figures.max_staleness}`}`;
  const shown = {
    step: `${Words.number(pipeline.step)}${pipeline.steps ? ` / ${Words.number(pipeline.steps)}` : ""}`,
    ...(isLive ? { "time left": Words.duration(pipeline.eta_s) } : {}),
    reward: Words.number(figures.reward),
    "samples/s": Words.number(figures.samples_per_s),
    "per step": Words.seconds(figures.step_s),
    "in flight": Words.number(figures.in_flight),
    staleness,
    weights: figures.version === null ? "–" : `v${figures.version}`,
    ...(isLive ? { workers: `${Words.number(figures.workers_alive)}${figures.workers === null ? "" : ` / ${figures.workers}`}` } : {}),
  };
  const body = Dom.keep(card, "progress", () => Dom.el("div"));
  const share = pipeline.steps ? Math.min(1, pipeline.step / pipeline.steps) : 0;
  body.replaceChildren(
    Dom.el("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * share) }, Dom.el("div", { style: `width: ${100 * share}%` })),
    Dom.el("div", { class: "figures" }, ...Object.entries(shown).map(([name, value]) => Dom.el("div", { class: "figure" }, Dom.el("b", {}, value), Dom.el("span", {}, name)))),
    Dom.el("p", { class: "faint", style: "margin-bottom: 10px" }, pipeline.waits));
}

function drawOtherMetric(card, pipeline, page) {
  if (!pipeline.others.length) return;
  const body = Dom.keep(card, "metric", () => Dom.el("div", {}, Dom.el("div", { class: "row", style: "margin: 10px 0 4px" },
    Dom.el("h3", {}, "Any other metric"), Dom.el("select", { "aria-label": "Metric", onchange: () => page.refresh() })), Dom.el("div", { class: "chart" })));
  const [select, chart] = [body.querySelector("select"), body.lastChild];
  const chosen = select.value || (pipeline.others.includes("loss") ? "loss" : pipeline.others[0]);
  Dom.options(select, pipeline.others, chosen);
  page.ask("metric", { pipeline: pipeline.name, name: select.value }).then((curve) => {
    const traces = [...Charts.band({ x: curve.x, y: curve.low }, { x: curve.x, y: curve.high }, "least to greatest"),
      Charts.line(curve, select.value, Charts.colour("blue"))];
    Charts.draw(chart, traces, { x: "optimiser step", y: select.value, height: 180, layout: { yaxis: { rangemode: "normal" }, showlegend: false } });
  });
}

function drawEnded(card, ended) {
  const names = Object.keys(ended);
  const total = Object.values(ended).reduce((sum, count) => sum + count, 0);
  const colours = names.map((name) => Charts.colour(name === "trained" ? "green" : "orange"));
  Charts.draw(Charts.place(card, "chart", ""), total ? [{ type: "bar", orientation: "h", y: names.map((name) => (name === "trained" ? name : `dropped: ${name}`)), x: Object.values(ended),
    text: Object.values(ended).map((count) => `${Words.number(count)} (${Words.share(count / total)})`), textposition: "auto", cliponaxis: false,
    marker: { color: colours }, hovertemplate: "%{x:,} samples", name: "samples" }] : [],
    { x: "samples", empty: "No sample has ended yet.", layout: { hovermode: "closest", yaxis: { autorange: "reversed" } } });
}

function drawLanes(card, data, page, empty) {
  const choice = Dom.keep(card, "window", () => Dom.el("div", { class: "row" }, Dom.el("span", { class: "faint" }, "show the last"),
    Dom.el("select", { "aria-label": "Window", onchange: () => page.refresh() }))).lastChild;
  Dom.options(choice, ["30", "120", "600", "all"], choice.value || "120", (value) => ({ 30: "30 seconds", 120: "2 minutes", 600: "10 minutes", all: "all recorded" })[value]);
  const from = choice.value === "all" ? -Infinity : data.now - Number(choice.value);
  const patterns = { training: "", generating: "/", waking: ".", leaving: ".", initialising: "-", scoring: "+", fenced: "x" };
  const palette = Charts.palette();
  const pipelines = [...new Set(data.stays.map((stay) => stay[1]))].sort();
  const kinds = new Map();
  for (const [device, pipeline, member, doing, since, until] of data.stays) {
    if (until < from) continue;
    const name = `${pipeline}: ${doing}`;
    if (!kinds.has(name)) {
      const colour = palette[pipelines.indexOf(pipeline) % palette.length];
      kinds.set(name, { type: "bar", orientation: "h", name, x: [], y: [], base: [], customdata: [], hovertemplate: "%{customdata}",
        marker: { color: colour, line: { width: 0 }, pattern: { shape: patterns[doing] ?? "", fillmode: "overlay", size: 6, solidity: 0.4, fgcolor: Charts.colour("card") } } });
    }
    const trace = kinds.get(name);
    const start = Math.max(since, from);
    trace.base.push(start - page.began);
    trace.x.push(until - start);
    trace.y.push(`device ${device}`);
    trace.customdata.push(`${member}: ${doing}, ${Words.seconds(until - since)}`);
  }
  Charts.draw(Charts.place(card, "chart", ""), [...kinds.values()].sort((one, other) => one.name.localeCompare(other.name)), {
    x: "time since the start (s)", height: 110 + 44 * data.devices.length, empty,
    layout: { barmode: "overlay", bargap: 0.25, hovermode: "closest", uirevision: choice.value,
      yaxis: { categoryorder: "array", categoryarray: data.devices.map((device) => `device ${device}`).reverse(), title: { text: "" } } } });
}

function drawLog(main, processes, page) {
  const card = Dom.card(main, "log", "Log", "the last lines; warnings are also above");
  const select = Dom.keep(card, "row", () => Dom.el("div", { class: "row" }, Dom.el("select", { "aria-label": "Process", onchange: () => page.refresh() }))).firstChild;
  const text = Dom.keep(card, "text", () => Dom.el("pre", { class: "log" }));
  if (!processes.length) { text.textContent = "No process has written a log yet."; return; }
  Dom.options(select, processes, select.value || processes.find((name) => name === "controller") || processes[0]);
  page.ask("log", { process: select.value }).then((log) => {
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 20;
    text.textContent = log.text || "This log is empty.";
    if (atEnd) text.scrollTop = text.scrollHeight;
  });
}
