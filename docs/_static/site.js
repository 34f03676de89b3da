/* Code and tables that scroll can be reached with the keyboard, and claims can be filtered. */
"use strict";

(() => {
  const update = () => {
    for (const element of document.querySelectorAll(".highlight pre, .table-wrapper, figure.wide"))
      if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
      else element.removeAttribute("tabindex");
  };
  update();
  window.addEventListener("resize", update);
})();

(() => {
  const tables = [...document.querySelectorAll("table.claims")];
  if (!tables.length) return;
  const make = (kind, own) => Object.assign(document.createElement(kind), own);
  const verdict = make("select", { innerHTML: ["all", "yes", "no", "undecided", "yes (expected)"].map((word) => `<option>${word}</option>`).join("") });
  const words = make("input", { type: "search", placeholder: "Table 2, stochastic, …" });
  const form = make("p", { className: "filter" });
  for (const [text, field] of [["Verdict: ", verdict], [" Rows with: ", words]]) {
    const label = make("label", { textContent: text });
    label.append(field);
    form.append(label);
  }
  const wrapper = (table) => table.closest(".table-wrapper") || table;
  wrapper(tables[0]).previousElementSibling.before(form);
  const text = (cell) => cell.querySelector("p") || cell;
  // "As above" is about the last row with a test and a rule of its own, which may be hidden.
  const sources = new Map();
  for (const table of tables) {
    let source;
    for (const row of table.tBodies[0].rows)
      if (text(row.cells[2]).textContent === "as above") sources.set(row, source);
      else source = row;
  }
  const update = () => {
    const phrase = words.value.trim().toLowerCase();
    for (const table of tables) {
      let above;
      for (const row of table.tBodies[0].rows) {
        const fits = verdict.value === "all" || text(row.cells[0]).textContent === verdict.value;
        row.hidden = !fits || !row.cells[1].textContent.toLowerCase().includes(phrase);
        const source = sources.get(row);
        if (row.hidden) continue;
        for (const place of source ? [2, 3] : [])
          text(row.cells[place]).textContent = source === above ? "as above" : text(source.cells[place]).textContent;
        above = source || row;
      }
      wrapper(table).hidden = wrapper(table).previousElementSibling.hidden = !above;
    }
  };
  for (const field of [verdict, words]) field.addEventListener("input", update);
})();
