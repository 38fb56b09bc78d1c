"use strict";
/* The sample browser: a table of samples, the text of one, and the story of a sample, prompt, step or version. */

const Samples = {
  draw(main, data, page) {
    const split = Dom.keep(main, "split", () => Dom.el("div", { class: "split" }));
    const list = Dom.card(split, "list", "Saved samples", data.count ? `${Words.number(data.count)} of them, the newest first` : "");
    const side = Dom.keep(split, "side", () => Dom.el("div", { style: "display: grid; gap: 16px" }));
    Samples.filters(list, data, page);
    const body = Dom.keep(list, "rows", () => Dom.el("div"));
    const columns = [
      ...["step", "sample", "prompt", "version"].map((name) => ({ title: name, number: true, of: (row) => String(row[name]) })),
      { title: "reward", number: true, of: (row) => Words.number(row.reward) },
      { title: "length", number: true, of: (row) => Words.number(row.length) },
    ];
    if (data.rows.some((row) => row.preview)) columns.push({ title: "text", kind: "preview mono", of: (row) => row.preview ?? "" });
    const rows = data.rows.map((row) => ({ ...row, selected: row.sample === page.sample, click: () => Samples.show(side, data.source, row.sample, page) }));
    const why = data.sources.length ? "No sample fits these conditions." : "No sample has been saved yet: see samples.save_every_steps in the configuration.";
    body.replaceChildren(rows.length ? Dom.table(columns, rows) : Dom.empty(why));
    Samples.pages(list, data, page);
    Samples.storyBox(side, page);
    if (page.sample === undefined && rows.length) Samples.show(side, data.source, data.rows[0].sample, page);
    if (page.pendingStory) {
      const { pipeline, kind, number } = page.pendingStory;
      page.pendingStory = undefined;
      Samples.showStory(side, pipeline, kind, number, page);
    }
  },

  filters(list, data, page) {
    const row = Dom.keep(list, "filters", () => {
      const number = (name, title, step) => Dom.el("input", { type: "number", placeholder: title, "aria-label": title, step,
        oninput: (event) => { page[name] = event.target.value; page.first = 0; page.refresh(); } });
      const source = Dom.el("select", { "aria-label": "Source", onchange: (event) => { page.source = event.target.value; page.first = 0; page.sample = undefined; page.refresh(); } });
      const conditions = page.exported ? [] : [number("step", "step", 1), number("low", "reward ≥", "any"), number("high", "reward ≤", "any")];
      return Dom.el("div", { class: "row" }, source, ...conditions);
    });
    Dom.options(row.firstChild, data.sources, data.source);
  },

  pages(list, data, page) {
    const shown = data.rows.length;
    const turn = (by) => () => { page.first = Math.max(0, data.first + by); page.refresh(); };
    const row = Dom.keep(list, "pages", () => Dom.el("div", { class: "row", style: "margin: 10px 0 0" }));
    row.replaceChildren(
      data.first > 0 ? Dom.el("button", { onclick: turn(-25) }, "newer") : "",
      data.first + shown < data.count ? Dom.el("button", { onclick: turn(25) }, "older") : "",
      Dom.el("span", { class: "faint small" }, shown ? `${data.first + 1} to ${data.first + shown} of ${Words.number(data.count)}` : ""),
      data.left_out ? Dom.el("span", { class: "faint small" }, `${Words.number(data.left_out)} older ones are not in this file`) : "");
  },

  show(side, source, sample, page) {
    page.sample = sample;
    page.ask("sample", { source, sample: String(sample) }).then((answer) => {
      if (page.sample !== sample) return;  // another one was clicked meanwhile
      const record = answer.sample;
      const card = Dom.card(side, "text", `Sample ${record.sample}`, `step ${record.step}, reward ${Words.number(record.reward)}, advantage ${Words.number(record.advantage)}`);
      if (side.firstChild !== card) side.prepend(card);
      const text = Dom.keep(card, "text", () => Dom.el("div", { class: "text mono" }));
      text.replaceChildren(...Samples.pieces(record));
      const asks = { sample: record.sample, prompt: record.prompt, step: record.step, version: record.version };
      const row = Dom.keep(card, "asks", () => Dom.el("div", { class: "row", style: "margin: 10px 0 0" }));
      row.replaceChildren(...Object.entries(asks).map(([kind, number]) =>
        Dom.el("button", { onclick: () => Samples.showStory(side, source.slice(0, source.indexOf("/")), kind, number, page) }, `story of ${kind} ${number}`)));
      if (answer.shortened) row.append(Dom.el("span", { class: "faint small" }, "the text was shortened"));
      row.hidden = page.exported;
      for (const line of document.querySelectorAll("tr[aria-selected]")) line.setAttribute("aria-selected", String(line.children[1]?.textContent === String(sample)));
    });
  },

  /** Text of the policy is highlighted; its context is faint. */
  pieces(record) {
    if (!Array.isArray(record.pieces)) {
      const { step, prompt, sample, version, reward, advantage, ...rest } = record;
      return [Object.entries(rest).map(([name, value]) => `${name}: ${Array.isArray(value) ? value.join(" ") : value}`).join("\n")];
    }
    return record.pieces.map((piece) => Dom.el("span", { class: piece.by === "policy" ? "policy" : "context" }, piece.text ?? `[${(piece.token_ids ?? []).join(" ")}]`));
  },

  storyBox(side, page) {
    if (page.exported) return;
    const card = Dom.card(side, "story", "Story of …", "from the journal, as printed by `penstock story`");
    const row = Dom.keep(card, "row", () => {
      const pipeline = Dom.el("select", { "aria-label": "Pipeline" });
      const kind = Dom.options(Dom.el("select", { "aria-label": "Kind" }), ["sample", "prompt", "step", "version"], "sample");
      const number = Dom.el("input", { type: "number", min: 0, placeholder: "number", "aria-label": "Number" });
      const go = () => { if (number.value !== "") Samples.showStory(side, pipeline.value, kind.value, Number(number.value), page); };
      number.addEventListener("keydown", (event) => { if (event.key === "Enter") go(); });
      return Dom.el("div", { class: "row" }, pipeline, kind, number, Dom.el("button", { onclick: go }, "show"));
    });
    const [pipeline] = row.children;
    Dom.options(pipeline, page.pipelines, pipeline.value || page.pipelines[0]);
    pipeline.hidden = page.pipelines.length < 2;
  },

  showStory(side, pipeline, kind, number, page) {
    const card = Dom.card(side, "story", `Story of ${kind} ${number}`, "from the journal, as printed by `penstock story`");
    const body = Dom.keep(card, "lines", () => Dom.el("div"));
    body.replaceChildren(Dom.empty("Reading the journal …"));
    page.ask("story", { pipeline, kind, number: String(number) }).then(
      (answer) => body.replaceChildren(Dom.el("div", { class: "text mono" }, answer.lines.join("\n"))),
      (error) => body.replaceChildren(Dom.empty(error.message)));
  },
};
