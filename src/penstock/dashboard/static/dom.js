"use strict";
/* Elements and formatted text. Data is inserted as text only, never as markup: this page does not use innerHTML. */

const Dom = {
  /** el("td", {class: "number"}, "4") */
  el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  },

  /** The child of `parent` with this `key`, created by `make` if missing. An existing child keeps its zoom and scroll. */
  keep(parent, key, make) {
    let node = parent.querySelector(`:scope > [data-key="${CSS.escape(key)}"]`);
    if (!node) {
      node = make();
      node.dataset.key = key;
      parent.append(node);
    }
    return node;
  },

  card(parent, key, title, note = "") {
    const card = Dom.keep(parent, key, () =>
      Dom.el("section", { class: "card" }, Dom.el("div", { class: "head" }, Dom.el("h2"), Dom.el("span", { class: "faint" }))));
    const [heading, remark] = card.firstChild.children;
    heading.textContent = title;
    remark.textContent = note;
    return card;
  },

  grid(parent, key, kind = "") {
    return Dom.keep(parent, key, () => Dom.el("div", { class: `grid ${kind}` }));
  },

  /** A container, collapsed at first if `isFolded`. */
  folded(parent, key, title, isFolded) {
    if (!isFolded) return Dom.keep(parent, key, () => Dom.el("div"));
    return Dom.keep(parent, key, () => Dom.el("details", { class: "more" }, Dom.el("summary", { class: "faint" }, title)));
  },

  table(columns, rows) {
    const head = columns.map((column) => Dom.el("th", { class: column.number ? "number" : null }, column.title));
    const body = rows.map((row) => {
      const cells = columns.map((column) => Dom.el("td", { class: column.number ? "number" : column.kind }, column.of(row)));
      return row.click
        ? Dom.el("tr", { class: "clickable", tabindex: 0, "aria-selected": String(Boolean(row.selected)), onclick: row.click,
            onkeydown: (event) => { if (event.key === "Enter") row.click(); } }, ...cells)
        : Dom.el("tr", {}, ...cells);
    });
    const table = Dom.el("table", {}, Dom.el("thead", {}, Dom.el("tr", {}, ...head)), Dom.el("tbody", {}, ...body));
    return Dom.el("div", { class: "scroll" }, table);
  },

  empty(why) {
    return Dom.el("div", { class: "empty" }, why);
  },

  options(select, values, chosen, label = (value) => value) {
    const state = JSON.stringify([values, chosen]);
    if (select.dataset.options === state) return select;
    select.dataset.options = state;
    select.replaceChildren(...values.map((value) => Dom.el("option", { value, selected: value === chosen ? "" : null }, label(value))));
    return select;
  },
};

const Words = {
  number(value, digits = 3) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
  },

  seconds(value) {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    if (value < 0.001) return `${Words.number(value * 1e6, 2)} µs`;
    if (value < 1) return `${Words.number(value * 1e3)} ms`;
    return value < 120 ? `${Words.number(value)} s` : Words.duration(value);
  },

  duration(value) {
    if (value === null || value === undefined) return "–";
    const total = Math.max(0, Math.round(value));
    const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
    if (days) return `${days} d ${hours} h`;
    if (hours) return `${hours} h ${minutes} min`;
    return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
  },

  bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let index = 0;
    while (value >= 1000 && index < units.length - 1) { value /= 1000; index += 1; }
    return `${Words.number(value)} ${units[index]}`;
  },

  clock(at) {
    return at ? new Date(at * 1000).toLocaleTimeString("en-GB") : "";
  },

  day(at) {
    return at ? `${new Date(at * 1000).toLocaleDateString("en-CA")} ${Words.clock(at)}` : "";
  },

  share(value) {
    return `${Math.round(value * 100)} %`;
  },
};
