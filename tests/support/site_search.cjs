// Prints, for queries in JSON, the pages that the site's search finds, best first: node site_search.cjs SITE QUERIES.
const { readFileSync } = require("node:fs");
const { runInThisContext } = require("node:vm");

const [site, queries] = process.argv.slice(2);
globalThis.window = globalThis;
globalThis._ready = () => {};
for (const file of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js", "_static/search.js"])
  runInThisContext(readFileSync(`${site}/${file}`, "utf8"), file);
const ranked = runInThisContext("Search.ranked");
console.log(JSON.stringify(JSON.parse(queries).map((asked) => {
  const { results, query, corrected } = ranked(asked);
  return { pages: results.map(([page, , place]) => page + place), query, corrected };
})));
