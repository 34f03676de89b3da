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
  const tables = document.querySelectorAll("table.claims");
  if (!tables.length) return;
  const label = document.createElement("label");
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "undecided, Table 2, …" });
  label.append("Show rows with: ", input);
  (tables[0].closest(".table-wrapper") || tables[0]).previousElementSibling.before(label);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of document.querySelectorAll("table.claims tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
})();
