/* Ranking and spelling for Sphinx's search.

Sphinx's index says which words are on which page and in which titles; this script decides the order. A rare word counts for more than a
common one, a word in a title for more than one in the text, and each page has a weight by its kind. A page is shown once, at the section
that fits best. A word that is not in the index is replaced by the nearest one that is. */
"use strict";

(() => {
  // The first pattern that matches the name of a page gives its weight: pages that teach come first, listings last.
  const WEIGHTS = [
    [/^(start|cookbook\/(?!index)|guides\/(?!index))/, 1.3],
    [/^(api\/(?!index)|tutorial|tour|choose|faq|explorer)/, 1.15],
    [/^course\/(?!index)/, 0.8],
    [/^(changelog|contributing|claims|studies\/|index$|.*\/index$)/, 0.4],
    [/^/, 1],
  ];
  const IN_TITLE = 3, IN_TEXT = 1, IS_NAME = 3.8, IN_NAME = 1.5;
  const OWN_TITLE = 1.3; // of a page, against those of its sections
  const MEMBERS = ["method", "property", "attribute"];
  const LONGEST_LIST = 25;

  const silent = new Set(stopwords);
  const weight = (page) => WEIGHTS.find(([pattern]) => pattern.test(page))[1];
  const list = (files) => (Array.isArray(files) ? files : [files]);
  const lowered = (text) => splitQuery(text.toLowerCase());
  const tells = (word) => word === "own" || !silent.has(word); // "a format of your own"

  // How many letters differ: inserted, left out, replaced, or swapped with the next one. More than `most` counts as infinitely many.
  const distance = (a, b, most) => {
    if (Math.abs(a.length - b.length) > most) return Infinity;
    let [before, row] = [[], Array.from({ length: b.length + 1 }, (_, j) => j)];
    for (let i = 1; i <= a.length; i++) {
      const next = [i];
      for (let j = 1; j <= b.length; j++) {
        next[j] = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] !== b[j - 1]));
        if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1]) next[j] = Math.min(next[j], before[j - 2] + 1);
      }
      [before, row] = [row, next];
    }
    return row[b.length] <= most ? row[b.length] : Infinity;
  };

  // What the index says, arranged by word.
  class Words {
    constructor(index) {
      this.index = index;
      this.stemmer = new Stemmer();
      this.pages = new Map(); // of a stem
      this.spelled = new Map(); // words of a stem: index terms are stems, which nobody would write
      for (const terms of [index.terms, index.titleterms])
        for (const [term, files] of Object.entries(terms)) list(files).forEach((file) => this.add(term.toLowerCase(), file));
      const entries = Object.entries(index.indexentries).map(([term, places]) => [term, places.filter(([, , isMain]) => isMain)]);
      this.titles = [...Object.entries(index.alltitles), ...entries].flatMap(([title, places]) => {
        const telling = lowered(title).filter(tells);
        const joined = telling.slice(1).map((word, i) => telling[i] + word); // "huggingface"
        const stems = new Set([...telling, ...joined].map((word) => this.stem(word)));
        places.forEach(([file]) => stems.forEach((stem) => this.add(stem, file)));
        return places.map(([file, place]) => ({ title, file, place, stems, length: telling.length }));
      });
      this.objects = Object.entries(index.objects).flatMap(([prefix, found]) =>
        found.map(([file, kind, , place, name]) => ({ file, kind, place, name: prefix ? `${prefix}.${name}` : name })));
      for (const { file, name } of this.objects) this.add(this.stem(name.split(".").at(-1).toLowerCase()), file);
    }

    add(stem, file) {
      if (!this.pages.has(stem)) this.pages.set(stem, new Set());
      this.pages.get(stem).add(file);
    }

    stem(word) {
      const stem = this.stemmer.stemWord(word);
      if (!this.spelled.has(stem)) this.spelled.set(stem, new Set());
      this.spelled.get(stem).add(word);
      return stem;
    }

    // A word of a query, and stems of the index: its own, all that begin with it, or the nearest.
    resolve(word) {
      const stem = this.stemmer.stemWord(word);
      if (this.pages.has(stem)) return { word, stems: [stem] };
      const longer = word.length > 2 ? [...this.pages.keys()].filter((other) => other.startsWith(word)) : [];
      if (longer.length) return { word, stems: longer };
      const nearest = this.nearest(word, stem);
      return nearest ? { ...nearest, corrected: true } : { word, stems: [] };
    }

    // Short words have too many neighbours: one letter may differ, and two from seven letters on.
    nearest(word, stem) {
      const most = word.length < 4 ? 0 : word.length < 7 ? 1 : 2;
      let best, least = Infinity;
      for (const [other, files] of this.pages) {
        if (!/^\p{Letter}[^_]+$/u.test(other)) continue;
        const common = 0.4 / (1 + files.size);
        for (const [form, given] of [[other, stem], ...[...(this.spelled.get(other) ?? [])].map((form) => [form, word])]) {
          // Of two that are as near, the one with the same first letter, then a word rather than a stem, then the one on more pages.
          const rank = distance(given, form, most) + 0.5 * (word[0] !== form[0]) + 0.4 * (given === stem && stem !== word) + common;
          if (rank < least) [best, least] = [{ word: form, stems: [other] }, rank];
        }
      }
      return best;
    }

    // Rare words say more than common ones.
    value(stems) {
      const files = new Set(stems.flatMap((stem) => [...this.pages.get(stem)]));
      return { files, value: Math.log(1 + this.index.docnames.length / Math.max(files.size, 1)) };
    }
  }

  let words;

  const understand = (query) => {
    words ??= new Words(Search._index);
    const given = lowered(query), telling = given.filter(tells);
    return (telling.length ? telling : given).map((word) => {
      const resolved = words.resolve(word);
      return { ...resolved, ...words.value(resolved.stems) };
    });
  };

  // What part of a query fits, squared: a page with all words comes before one with a single word in its title.
  const coverage = (asked, fits) => {
    const sum = (terms) => terms.reduce((total, { value }) => total + value, 0);
    return (sum(asked.filter(fits)) / sum(asked)) ** 2;
  };

  // For each page, the title that fits best: its own, or that of a section.
  const pages = (asked) => {
    const { docnames, titles, filenames } = words.index, best = new Map();
    for (const { title, file, place, stems, length } of words.titles) {
      const inTitle = ({ stems: any }) => any.some((stem) => stems.has(stem));
      const share = Math.min(asked.filter(inTitle).length / length, 1) || 0;
      const own = place === null ? OWN_TITLE : 1;
      const points = ({ files, value }, isInTitle) => value * (isInTitle ? IN_TITLE * own * (0.6 + 0.4 * share) : files.has(file) ? IN_TEXT : 0);
      const score = asked.reduce((sum, term) => sum + points(term, inTitle(term)), 0) * weight(docnames[file])
        * coverage(asked, (term) => inTitle(term) || term.files.has(file));
      const before = best.get(file);
      if (score > 0 && !(score < before?.score || (score === before?.score && place !== null))) best.set(file, { title, place, score });
    }
    return [...best].map(([file, { title, place, score }]) => [
      docnames[file], place === null ? title : `${titles[file]} › ${title}`, place === null ? "" : `#${place}`, null, score,
      filenames[file], place === null ? "text" : "title",
    ]);
  };

  // Names of the interface that begin with a word of the query.
  const objects = (asked, given) => {
    const { docnames, titles, filenames, objnames } = words.index;
    return words.objects.flatMap(({ file, kind, place, name }) => {
      const parts = name.toLowerCase().split("."), last = parts.at(-1);
      const isName = ({ word }) => last === word || given.has(parts.slice(-2).join("."));
      const inName = ({ word }) => parts.some((part) => part.startsWith(word));
      if (!asked.some((term) => isName(term) || (term.word.length > 2 && last.startsWith(term.word)))) return [];
      const points = (term) => term.value * (isName(term) ? IS_NAME : inName(term) ? IN_NAME : term.files.has(file) ? IN_TEXT : 0);
      const [, prefix, label] = objnames[kind];
      const near = (MEMBERS.includes(prefix) ? 0.5 : 1) * 0.97 ** parts.length;
      const score = asked.reduce((sum, term) => sum + points(term), 0) * weight(docnames[file]) * near
        * coverage(asked, inName);
      const anchor = place === "" ? name : place === "-" ? `${prefix}-${name}` : place;
      return [[docnames[file], name, `#${anchor}`, `${label}, in ${titles[file]}`, score, filenames[file], "object"]];
    });
  };

  // The results of a query, best first, and the query as it was understood.
  Search.ranked = (query) => {
    const asked = understand(query).filter(({ stems }, _, all) => stems.length || all.every((term) => !term.stems.length));
    const given = new Set(query.toLowerCase().split(/[\s()]+/));
    const found = [...pages(asked), ...objects(asked, given)].sort((a, b) => b[4] - a[4] || a[1].localeCompare(b[1]));
    const results = found.filter((result) => result[4] >= 0.15 * found[0][4]).slice(0, LONGEST_LIST);
    return { results, query: asked.map(({ word }) => word).join(" "), corrected: asked.some(({ corrected }) => corrected) };
  };

  Search.query = (query) => {
    const { results, query: understood, corrected } = Search.ranked(query);
    const [, terms, , highlighted] = Search._parseQuery(corrected ? understood : query);
    if (corrected) {
      const note = document.createElement("p");
      note.append("Showing results for ", Object.assign(document.createElement("strong"), { textContent: understood }), ".");
      Search.output.before(note);
    }
    _displayNextItem(results.reverse(), results.length, terms, highlighted);
  };
})();
