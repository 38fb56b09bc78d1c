"use strict";
/* Selects the run and the view, and refreshes them. The address after # names both: #/run/view/pipeline. */

const EXPORTED = document.getElementById("exported") && JSON.parse(document.getElementById("exported").textContent);
const PACE_MS = { running: 1500, other: 8000, behind: 50, failed: 4000 };

const page = {
  exported: Boolean(EXPORTED),
  run: undefined,
  view: "overview",
  pipeline: undefined,
  pipelines: [],
  time: Charts.elapsed(0, 1),
  /** Queries the present run. */
  ask: (view, query) => ask(page.run, view, query),
  refresh: () => tick(true),
  /** Opens the story of the clicked point. */
  pendingStory: undefined,
  openStory(pipeline, kind, number) {
    if (EXPORTED) return;
    page.pendingStory = { pipeline, kind, number };
    go(page.run, "samples");
  },
};

let timer = 0;
let round = 0;
let seen = "";
let answeredAt = 0;

async function get(address) {
  const response = await fetch(address);
  const body = await response.json().catch(() => ({ error: `The dashboard failed to answer this (${response.status}).` }));
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body;
}

async function ask(run, view, query) {
  const parameters = Object.entries(query).sort(([one], [other]) => (one < other ? -1 : 1));
  if (EXPORTED) {
    const found = EXPORTED.answers[`${run}/${view}?${parameters.map(([name, value]) => `${name}=${value}`).join("&")}`];
    if (!found) throw new Error("This is not part of the exported file.");
    return found;
  }
  return get(`api/runs/${encodeURIComponent(run)}/${view}?${new URLSearchParams(parameters)}`);
}

async function listRuns() {
  return EXPORTED ? EXPORTED.runs : (await get("api/runs")).runs;
}

function follow() {
  const [run, view, pipeline] = location.hash.slice(2).split("/").map(decodeURIComponent);
  if (run !== page.run) {
    Object.assign(page, { sample: undefined, source: undefined, first: 0, pipelines: [] });
    for (const id of ["pill", "sentence", "reading", "freshness"]) document.getElementById(id).textContent = "";
  }
  Object.assign(page, { run: run || page.run, view: view in tabs ? view : "overview", pipeline: pipeline || undefined });
  document.getElementById("main").replaceChildren(Dom.el("div", { "data-key": "opening" }, Dom.empty("Opening …")));
  tick(true);
}

function go(run, view, pipeline = "") {
  location.hash = `/${[run, view, pipeline].map(encodeURIComponent).join("/")}`;
}

const tabs = { ...Object.fromEntries(Object.entries(Views).map(([name, view]) => [name, view.title])), runs: "Runs" };

function drawTabs() {
  const nav = document.getElementById("tabs");
  const shows = `${page.run}/${page.view}`;
  if (nav.dataset.shows === shows) return;  // on a narrow screen it may have been scrolled
  nav.dataset.shows = shows;
  const shown = Object.entries(tabs).filter(([name]) => !(EXPORTED && name === "runs"));
  nav.replaceChildren(...shown.map(([name, title]) =>
    Dom.el("a", { href: `#/${[page.run, name].map(encodeURIComponent).join("/")}`, "aria-current": name === page.view ? "page" : null }, title)));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function drawState(data) {
  const pill = document.getElementById("pill");
  pill.className = `pill ${data.state.tone}`;
  pill.textContent = data.state.word;
  document.getElementById("sentence").textContent = data.state.sentence;
  document.getElementById("reading").textContent = data.share_read < 0.999 ? `reading the files … ${Words.share(data.share_read)}` : "";
  document.title = `${data.state.word} · ${page.run} · Penstock`;
}

/** One refresh. Its answers are discarded if a newer one has started (the user clicked). */
async function tick(anew = false) {
  clearTimeout(timer);
  const mine = ++round;
  if (anew) seen = "";
  let wait = PACE_MS.other;
  try {
    if (page.view === "runs") {
      await Runs.draw(document.getElementById("main"), () => mine === round);
    } else {
      wait = await drawView(mine);
    }
    answeredAt = Date.now();
  } catch (error) {
    if (mine !== round) return;
    const sentence = error instanceof TypeError && !EXPORTED ? "The dashboard does not answer: was it stopped?" : error.message;
    drawTabs();
    const opening = document.querySelector('[data-key="opening"]');
    if (opening) opening.replaceChildren(Dom.empty(sentence));
    else document.getElementById("freshness").textContent = sentence;
    wait = PACE_MS.failed;
  }
  if (mine === round && !EXPORTED) timer = setTimeout(tick, document.hidden ? 10 * PACE_MS.other : wait);
}

async function drawView(mine) {
  const view = Views[page.view];
  if (page.view !== "overview" && !page.pipelines.length) await learn();
  page.pipeline ??= page.pipelines[0];
  const [name, query] = view.ask(page);
  const data = await page.ask(name, seen && !EXPORTED ? { ...query, seen } : query);
  if (mine !== round) return 0;
  drawTabs();
  drawState(data);
  const wait = data.share_read < 0.999 ? PACE_MS.behind : data.state.word === "running" ? PACE_MS.running : PACE_MS.other;
  if (data.unchanged) return wait;
  seen = data.revision;
  if (name === "overview") learnFrom(data);
  else if (data.state.word === "running" || data.share_read < 0.999) {
    await learn();
    if (mine !== round) return 0;
  }
  const main = document.getElementById("main");
  main.querySelector('[data-key="opening"]')?.remove();
  if (view.perPipeline) drawPipelines(main);
  view.draw(main, data, page);
  return wait;
}

async function learn() {
  learnFrom(await page.ask("overview", {}));
}

function learnFrom(overview) {
  page.pipelines = overview.pipelines.map((one) => one.name);
  page.began = overview.began_at ?? 0;
  page.time = Charts.elapsed(page.began, overview.latest_at ?? page.began + 1);
  const took = overview.latest_at ? `${Words.day(overview.began_at)}, ${Words.duration(overview.latest_at - overview.began_at)}` : "";
  document.getElementById("freshness").textContent = took;
}

function drawPipelines(main) {
  if (page.pipelines.length < 2) return;
  const row = Dom.keep(main, "pipelines", () => Dom.el("div", { class: "row", style: "margin: 0" }));
  row.replaceChildren(...page.pipelines.map((name) =>
    Dom.el("button", { onclick: () => go(page.run, page.view, name), style: name === page.pipeline ? "border-color: var(--blue); font-weight: 600" : null }, name)));
}

async function start() {
  const runs = await listRuns();
  const select = document.getElementById("runs");
  Dom.options(select, runs.map((run) => run.id), location.hash.slice(2).split("/").map(decodeURIComponent)[0] || runs[0].id);
  select.addEventListener("change", () => go(select.value, page.view));
  window.addEventListener("hashchange", () => { follow(); select.value = page.run; });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !EXPORTED) tick(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => follow());
  if (location.hash.length > 2) follow();
  else go(runs[0].id, "overview");
}

start();
