"use strict";
/* All runs of the folder, and the reward curves of those that are ticked, one chart per pipeline. */

const Runs = {
  ticked: undefined,
  axis: "step",

  /** `isCurrent` says whether anybody still wants this drawn. */
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
      { title: "made", kind: "moment", of: (run) => Words.day(run.made_at) },
      { title: "steps", of: (run) => Object.entries(run.steps ?? {}).map(([name, last]) => `${name} ${last.step}`).join(", ") },
      { title: "reward", of: (run) => Object.entries(run.steps ?? {}).map(([name, last]) => `${name} ${Words.number(last.reward)}`).join(", ") },
    ], runs));
    const chosen = runs.filter((run) => Runs.ticked.has(run.id) && !run.trouble).slice(0, 8);
    const query = new URLSearchParams(chosen.map((run) => ["run", run.id]));
    const compared = chosen.length ? (await get(`api/compare?${query}`)).runs : {};
    if (isCurrent()) Runs.compare(main, compared);
  },

  compare(main, compared) {
    const row = Dom.keep(main, "axis", () => Dom.el("div", { class: "row", style: "margin: 0" }, Dom.el("span", { class: "faint" }, "compare by"),
      Dom.options(Dom.el("select", { "aria-label": "Axis", onchange: (event) => { Runs.axis = event.target.value; page.refresh(); } }), ["step", "minutes"], Runs.axis)));
    row.hidden = !Object.keys(compared).length;
    const byPipeline = new Map();
    Object.entries(compared).forEach(([run, answer], index) => {
      for (const [pipeline, reward] of Object.entries(answer.pipelines)) {
        if (!byPipeline.has(pipeline)) byPipeline.set(pipeline, []);
        const x = Runs.axis === "step" ? reward.smooth.x : reward.at.y.slice(0, reward.smooth.x.length).map((at) => (at - reward.at.y[0]) / 60);
        byPipeline.get(pipeline).push(Charts.line({ x, y: reward.smooth.y }, run, Charts.nth(index), { line: { width: 2, ...Charts.pen(index) } }));
      }
    });
    const grid = Dom.grid(main, "charts");
    for (const stale of [...grid.children].filter((child) => !byPipeline.has(child.dataset.key))) stale.remove();
    for (const [pipeline, traces] of byPipeline) {
      Charts.draw(Charts.place(Dom.card(grid, pipeline, pipeline, "mean reward, smoothed"), "chart", ""), traces, {
        x: Runs.axis === "step" ? "optimiser step" : "minutes since the first step", y: "mean reward", height: 340, empty: "No step has been trained yet.", layout: { showlegend: true, hovermode: "x" } });
    }
  },
};
