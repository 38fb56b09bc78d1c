"use strict";
/* All runs of the folder; for the ticked ones, the curves of one metric and the settings that differ. */

const Runs = {
  ticked: undefined,
  axis: "step",
  metric: "reward",
  charts: undefined,

  /** `isCurrent`: whether this is still the view to draw. */
  async draw(main, isCurrent) {
    const runs = await listRuns();
    if (!isCurrent()) return;
    drawTabs();
    main.querySelector('[data-key="opening"]')?.remove();
    Runs.ticked ??= new Set(runs.filter((run) => run.ended !== "failed" && Object.keys(run.steps ?? {}).length).slice(0, 4).map((run) => run.id));
    const card = Dom.card(main, "runs", "Runs", `${runs.length} in this folder; tick those to compare`);
    Dom.keep(card, "table", () => Dom.el("div")).replaceChildren(Dom.table([
      { title: "", of: (run) => Dom.el("input", { type: "checkbox", "aria-label": `compare ${run.id}`, checked: Runs.ticked.has(run.id) ? "" : null,
        onchange: (event) => { if (event.target.checked) Runs.ticked.add(run.id); else Runs.ticked.delete(run.id); page.refresh(); } }) },
      { title: "run", of: (run) => Dom.el("a", { href: `#/${encodeURIComponent(run.id)}/overview`, style: "color: inherit" }, run.id) },
      { title: "state", of: (run) => run.trouble ?? (run.alive ? "running" : run.ended ?? "ended") },
      { title: "created", kind: "moment", of: (run) => Words.day(run.made_at) },
      { title: "steps", of: (run) => Object.entries(run.steps ?? {}).map(([name, last]) => `${name} ${last.step}`).join(", ") },
      { title: "reward", of: (run) => Object.entries(run.steps ?? {}).map(([name, last]) => `${name} ${Words.number(last.reward)}`).join(", ") },
    ], runs));
    const chosen = runs.filter((run) => Runs.ticked.has(run.id) && !run.trouble).slice(0, 8);
    const query = new URLSearchParams([...chosen.map((run) => ["run", run.id]), ["metric", Runs.metric]]);
    const answer = chosen.length ? await get(`api/compare?${query}`) : { runs: {}, metrics: [], differences: [] };
    if (!isCurrent()) return;
    Runs.compare(main, answer);
    Runs.differ(main, answer);
  },

  compare(main, answer) {
    const compared = answer.runs;
    const row = Dom.keep(main, "axis", () => {
      const select = (name, label) => Dom.el("select", { "aria-label": label, onchange: (event) => { Runs[name] = event.target.value; page.refresh(); } });
      return Dom.el("div", { class: "row", style: "margin: 0" }, Dom.el("span", { class: "faint" }, "compare"), select("metric", "Metric"),
        Dom.el("span", { class: "faint" }, "by"), select("axis", "Axis"), select("charts", "Charts"));
    });
    row.hidden = !Object.keys(compared).length;
    const [metric, axis, charts] = row.querySelectorAll("select");
    Dom.options(metric, answer.metrics, Runs.metric);
    Dom.options(axis, ["step", "minutes"], Runs.axis);
    const names = Object.values(compared).map((one) => Object.keys(one.pipelines));
    const alone = names.every((own) => own.length === 1);
    const together = (Runs.charts ?? (alone ? "together" : "apart")) === "together";
    Dom.options(charts, ["apart", "together"], together ? "together" : "apart", (value) => ({ apart: "a chart for each pipeline name", together: "in one chart" })[value]);
    charts.hidden = new Set(names.flat()).size < 2;
    const drawn = new Map();
    let index = -1;
    for (const [run, { pipelines }] of Object.entries(compared)) {
      if (!together) index += 1;
      for (const [pipeline, found] of Object.entries(pipelines)) {
        if (together) index += 1;
        const title = together ? (charts.hidden ? names.flat()[0] : "All pipelines") : pipeline;
        if (!drawn.has(title)) drawn.set(title, []);
        const x = Runs.axis === "step" ? found.smooth.x : Runs.minutes(found.smooth.x, found.at);
        const label = together && !alone ? `${run}: ${pipeline}` : run;
        drawn.get(title).push(Charts.line({ x, y: found.smooth.y }, label, Charts.nth(index), { line: { ...Charts.pen(index), width: 2 } }));
      }
    }
    const grid = Dom.grid(main, "charts", "pair");
    for (const stale of [...grid.children].filter((child) => !drawn.has(child.dataset.key))) stale.remove();
    for (const [title, traces] of drawn) {
      Charts.draw(Charts.place(Dom.card(grid, title, title, `${Runs.metric}, smoothed`), "chart", ""), traces, {
        x: Runs.axis === "step" ? "optimiser step" : "minutes since the first step", y: Runs.metric, height: 340, empty: "No step has this metric yet.",
        layout: { showlegend: true, hovermode: "x", yaxis: { rangemode: Runs.metric === "reward" ? "tozero" : "normal" } } });
    }
  },

  /** Time of each of these steps, in minutes since the first. */
  minutes(steps, at) {
    let place = 0;
    return steps.map((step) => {
      while (place < at.x.length - 1 && at.x[place] < step) place += 1;
      return (at.y[place] - at.y[0]) / 60;
    });
  },

  differ(main, answer) {
    const runs = Object.keys(answer.runs);
    const card = Dom.card(main, "differences", "Settings that differ", answer.differences.length ? "" : "none: these runs were configured alike");
    main.append(card);
    card.hidden = runs.length < 2;
    Dom.keep(card, "table", () => Dom.el("div")).replaceChildren(answer.differences.length ? Dom.table([
      { title: "key", kind: "mono key", of: (row) => row.key },
      ...runs.map((run) => ({ title: run, kind: "mono", of: (row) => row.values[run] ?? "–" })),
    ], answer.differences) : "");
  },
};
