// The page: inputs, what is computed from them, and their state in the address.

const DEFAULTS = {
  x: "0.3", format: "e4m3", overflow: "saturate", bits: "32",
  values: "0.1 -0.2 0.3 0.05 -1.5 2.25 0.7 -0.01", size: "4", scale: "e8m0", rule: "floor",
};
const CHOICES = { overflow: ["saturate", "saturate_symmetric", "nonfinite", "format"], rule: Object.keys(RULES).filter((name) => name !== "stochastic") };
const AROUND = 4, LISTED_BITS = 8, LONGEST = 4096;

const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const table = (caption, header, rows) =>
  `<div class="scrolled" tabindex="0" role="region" aria-label="${caption}"><table><caption>${caption}</caption><thead><tr>` +
  header.map((cell) => `<th scope="col">${cell}</th>`).join("") +
  `</tr></thead><tbody>${rows.join("")}</tbody></table></div>`;
const row = ([first, ...rest], kind = "") =>
  `<tr${kind && ` class="${kind}"`}><th scope="row">${first}</th>${rest.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;

/** The next value of a format, above or below a number. */
function next(x, fmt, way) {
  const { to_bits, from_bits } = double, up = way === "up";
  const beyond = x === 0 ? (up ? Number.MIN_VALUE : -Number.MIN_VALUE) : from_bits(to_bits(x) + (x > 0 === up ? 1n : -1n));
  return quantize(beyond, fmt, way);
}

function field(name, label, hint, extra = "") {
  const id = `explorer-${name}`, described = hint ? ` aria-describedby="${id}-hint"` : "";
  const choices = CHOICES[name];
  const control = choices
    ? `<select id="${id}" name="${name}">${choices.map((each) => `<option>${each}</option>`).join("")}</select>`
    : name === "values"
      ? `<textarea id="${id}" name="values" rows="3" spellcheck="false"${described}></textarea>`
      : `<input id="${id}" name="${name}" autocomplete="off" autocapitalize="off" spellcheck="false"${described} ${extra}>`;
  return `<div class="field"><label for="${id}">${label}</label>${control}${hint ? `<small id="${id}-hint">${hint}</small>` : ""}</div>`;
}

const NUMBER = `${field("x", "Number", "0.3, 2^-9, 1/3, 0x3e99999a, inf", 'inputmode="text"')}
  ${field("format", "Format", "e4m3, e3m2b4fn, int6, Float(3, 2, bias=4)", 'list="explorer-formats"')}
  <datalist id="explorer-formats">${SHOWN.map((name) => `<option value="${name}"></option>`).join("")}</datalist>`;
const SMALL = `<form class="fields">${NUMBER}</form>
  <p class="result" role="status" aria-live="polite"></p><div data-part="line"></div>
  <p><a data-part="link" href="explorer.html">All roundings, bits and blocks: the explorer</a></p>`;
const WHOLE = `<form class="fields" aria-label="Number and format">${NUMBER}
  ${field("overflow", "Overflow", "")}${field("bits", "Random bits", "1 to 32", 'type="number" min="1" max="32"')}</form>
  <p class="result" role="status" aria-live="polite"></p>
  <div class="steps"><button type="button" data-step="down">← Previous value</button><button type="button" data-step="up">Next value →</button>
  <button type="button" data-copy>Copy link</button></div>
  <section><h2>Bits</h2><div data-part="code"></div></section>
  <section><h2>Number line</h2><div data-part="line"></div></section>
  <section class="narrow"><h2>Roundings</h2><div data-part="roundings"></div></section>
  <section class="narrow"><h2>Neighbours and format</h2><div data-part="facts"></div></section>
  <section><h2>Blocks that share a scale</h2>
  <form class="fields" aria-label="Blocks">${field("values", "Numbers", "pasted, with spaces, commas or lines between them")}
  ${field("size", "Block size", "", 'type="number" min="1"')}${field("scale", "Scale format", "", 'list="explorer-formats"')}${field("rule", "Rule", "")}</form>
  <p class="summary" data-part="summary" role="status" aria-live="polite"></p><div data-part="blocks"></div></section>`;

class Explorer {
  constructor(root) {
    this.root = root;
    this.whole = root.dataset.explorer === "whole";
    root.innerHTML = this.whole ? WHOLE : SMALL;
    root.addEventListener("input", () => this.changed());
    root.addEventListener("submit", (event) => event.preventDefault());
    root.addEventListener("click", (event) => this.clicked(event.target));
    new ResizeObserver(() => this.drawn && this.line()).observe(this.part("line"));
    if (this.whole) addEventListener("hashchange", () => this.read());
    this.read();
  }

  part(name) {
    return this.root.querySelector(`[data-part="${name}"]`);
  }

  get inputs() {
    return [...this.root.querySelectorAll("[name]")];
  }

  get state() {
    return { ...DEFAULTS, ...Object.fromEntries(this.inputs.map((input) => [input.name, input.value])) };
  }

  /** Take the state from the address. */
  read() {
    const given = new URLSearchParams(this.whole && location.hash.includes("=") ? location.hash.slice(1) : "");
    for (const input of this.inputs) {
      input.value = given.get(input.name) ?? DEFAULTS[input.name];
      if (CHOICES[input.name] && !CHOICES[input.name].includes(input.value)) input.value = DEFAULTS[input.name];
    }
    this.show();
  }

  changed() {
    const { state } = this, parameters = new URLSearchParams(Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]));
    const address = `#${parameters}`;
    if (this.whole) history.replaceState(null, "", parameters.size ? address : location.pathname + location.search);
    else this.part("link").href = `explorer.html${parameters.size ? address : ""}`;
    this.show();
  }

  set(x) {
    this.root.querySelector('[name="x"]').value = shown(x).replace("∞", "inf");
    this.changed();
  }

  clicked(target) {
    const button = target.closest("button");
    if (!button) return;
    if (button.dataset.step) this.set(next(Number.isNaN(this.drawn.y) ? 0 : this.drawn.y, this.drawn.fmt, button.dataset.step));
    if (button.dataset.bit) {
      this.set(decode((this.drawn.code ^ (2 ** Number(button.dataset.bit))) >>> 0, this.drawn.fmt));
      this.part("code").querySelector(`[data-bit="${button.dataset.bit}"]`)?.focus();
    }
    if ("copy" in button.dataset) {
      navigator.clipboard?.writeText(location.href).then(() => (button.textContent = "Copied"), () => (button.textContent = "Copy the address above"));
    }
  }

  show() {
    const { state, root } = this, result = root.querySelector(".result");
    this.drawn = null;
    root.querySelectorAll("[aria-invalid]").forEach((input) => input.removeAttribute("aria-invalid"));
    const read = (name, how) => {
      try {
        return how(state[name]);
      } catch (error) {
        root.querySelector(`[name="${name}"]`).setAttribute("aria-invalid", "true");
        throw error;
      }
    };
    try {
      const x = read("x", number), fmt = read("format", format), bits = read("bits", (text) => whole(text, 32));
      const y = quantize(x, fmt, "nearest", state.overflow);
      this.drawn = { x, fmt, y, bits, overflow: state.overflow, code: encode(y, fmt) };
      result.innerHTML = this.sentence();
      this.line();
      if (this.whole) this.details();
      if (this.whole) this.blocks(read("values", numbers), read("size", (text) => whole(text, LONGEST)), read("scale", format), state.rule);
    } catch (error) {
      const place = this.drawn ? this.part("summary") : result;
      place.innerHTML = `<span class="error">${escaped(error.message)}</span>`;
    }
    root.classList.toggle("failed", !this.drawn);
  }

  sentence() {
    const { x, fmt, y, code } = this.drawn, largest = x < 0 ? fmt.grid.min : fmt.grid.max;
    const said = Number.isNaN(y) && fmt.coding.nan < 0 ? "which has no code" : `code ${hexadecimal(code, fmt.bits)}`;
    const beyond = Math.abs(x) > Math.abs(largest) ? ` <span class="note">It is beyond ${shown(largest)}, the ${x < 0 ? "smallest" : "largest"} value.</span>` : "";
    return `<span class="from">${shown(x)} in ${escaped(fmt.spelling)} is</span> <strong data-value="nearest">${shown(y)}</strong><span class="from">, ${said}</span>${beyond}`;
  }

  details() {
    const { x, fmt, y, bits, overflow, code } = this.drawn;
    this.part("code").innerHTML = bit_buttons(fmt, code);
    const cells = (name, result, share) => [
      name, `<span data-value="${name}">${shown(result)}</span>`, Number.isNaN(result) && fmt.coding.nan < 0 ? "none" : hexadecimal(encode(result, fmt), fmt.bits),
      Number.isFinite(result) && Number.isFinite(x) ? shown(Math.fround(result - x)) : "", share,
    ];
    const rows = Object.keys(MODES).filter((name) => !name.startsWith("stochastic")).map((name) => row(cells(name, quantize(x, fmt, name, overflow), "100 %")));
    const { below, above, up } = chance(x, fmt, overflow, bits);
    if (up < 1) rows.push(row(cells("stochastic", below, `<span data-chance="down">${percent(1 - up)}</span>`), "stochastic"));
    if (up > 0) rows.push(row(cells("stochastic", above, `<span data-chance="up">${percent(up)}</span>`), "stochastic"));
    this.part("roundings").innerHTML = table("Results of all roundings", ["rounding", "result", "code", "error", "probability"], rows);
    const lower = next(y, fmt, "down"), upper = next(y, fmt, "up");
    this.part("facts").innerHTML = table("Numbers of the format", ["property", "value"], facts(fmt, y, lower, upper).map((each) => row(each)));
  }

  blocks(values, size, scale_format, rule) {
    const { fmt } = this.drawn, blocks = quantize_blocks(values, fmt, size, scale_format, rule);
    const rows = blocks.flatMap(({ scale, elements }, number) =>
      elements.map(({ x, element, code, value }, place) =>
        row([shown(x), `<span data-block>${shown(value)}</span>`, shown(element), hexadecimal(code, fmt.bits), place ? "" : shown(scale)], place || !number ? "" : "first")));
    this.part("blocks").innerHTML = table("Numbers rounded under scales", ["number", "result", "element", "code", "scale"], rows);
    const all = blocks.flatMap((block) => block.elements).filter(({ x }) => Number.isFinite(x));
    const energy = (numbers) => numbers.reduce((total, each) => total + each * each, 0);
    const ratio = energy(all.map(({ x }) => x)) / energy(all.map(({ x, value }) => value - x));
    const quality = Number.isFinite(ratio) ? `${(10 * Math.log10(ratio)).toFixed(1)} dB of signal to rounding error` : "no rounding error";
    const width = fmt.bits + scale_format.bits / size;
    this.part("summary").textContent = `${values.length} numbers in ${blocks.length} ${blocks.length === 1 ? "block" : "blocks"}: ${quality}, ${Number(width.toFixed(3))} bits per number.`;
  }

  line() {
    this.part("line").innerHTML = number_lines(this.drawn, this.part("line").clientWidth || 360);
  }
}

function whole(text, most) {
  const value = Number(text);
  if (!Number.isInteger(value) || value < 1 || value > most) throw new Error(`type a whole number from 1 to ${most}, not “${text}”`);
  return value;
}

function numbers(text) {
  const words = text.split(/[\s,;[\]()]+/).filter(Boolean);
  if (words.length > LONGEST) throw new Error(`these are ${words.length} numbers; the explorer takes ${LONGEST}`);
  return words.map(number);
}

function fields_of(fmt) {
  const { kind, signed, exponent, mantissa, bits } = fmt, sign = signed ? [["sign", 1]] : [];
  if (kind === "Fixed") return [...sign, [fmt.fraction ? "steps" : "integer", bits - Number(signed)]];
  return [...sign, ["exponent", exponent], ...(mantissa ? [["mantissa", mantissa]] : [])];
}

/** A button for each bit of a code, in the fields of its format. */
function bit_buttons(fmt, code) {
  let place = fmt.bits;
  const groups = fields_of(fmt).filter(([, count]) => count > 0).map(([name, count]) => {
    const buttons = Array.from({ length: count }, () => {
      place -= 1;
      const set = Math.floor(code / 2 ** place) % 2;
      return `<button type="button" data-bit="${place}" aria-pressed="${set === 1}" aria-label="${set}: ${name}, bit ${place}">${set}</button>`;
    });
    return `<div class="bits ${name}" role="group" aria-label="${name}"><div>${buttons.join("")}</div><span aria-hidden="true">${name}</span></div>`;
  });
  return `<div class="code">${groups.join("")}</div><p class="note">Each bit is a button that flips it.</p>`;
}

function facts(fmt, y, lower, upper) {
  const { grid, coding, kind } = fmt, codes = [["NaN", coding.nan], ["infinity", coding.infinity]].filter(([, code]) => code >= 0);
  return [
    ["value below", shown(lower)], ["value above", shown(upper)], ["largest", shown(grid.max)], ["smallest", shown(grid.min)],
    ...(kind === "Float" ? [["smallest normal", shown(2 ** grid.exponent)]] : []), ["smallest positive", shown(grid.least)],
    ["bits", fields_of(fmt).filter(([, count]) => count > 0).map(([name, count]) => `${count} ${name}`).join(", ")],
    ...(kind === "Fixed" ? [] : [["bias", fmt.bias]]),
    ["reserved codes", codes.map(([name, code]) => `${name} ${hexadecimal(code, fmt.bits)}`).join(", ") || "none"],
  ];
}

/** The neighbourhood of a number, and all values of a small format. */
function number_lines(drawn, width) {
  const { x, fmt, y } = drawn;
  if (Number.isNaN(x)) return '<p class="note">NaN has no place on the line.</p>';
  const inside = Math.min(Math.max(x, fmt.grid.min), fmt.grid.max);
  const ends = [quantize(inside, fmt, "down"), quantize(inside, fmt, "up")], values = new Set(ends);
  for (let k = 0, [low, high] = ends; k < AROUND; k++) {
    values.add((low = next(low, fmt, "down")));
    values.add((high = next(high, fmt, "up")));
  }
  const near = [...values].sort((a, b) => a - b), marked = { x: inside, y: Number.isFinite(y) ? y : inside };
  const close = svg(near, (value) => value, marked, width, `Values next to ${shown(x)}: ${near.map(shown).join(", ")}`, true);
  if (fmt.bits > LISTED_BITS) return close;
  const all = Array.from({ length: 2 ** fmt.bits }, (_, code) => decode(code, fmt)).filter(Number.isFinite).sort((a, b) => a - b);
  const unit = fmt.kind === "Fixed" ? Infinity : 2 ** fmt.grid.exponent;
  const place = (value) => (unit === Infinity ? value : fmt.kind === "PowerOfTwo" ? Math.log2(value) : Math.sign(value) * Math.log2(1 + Math.abs(value) / unit));
  const scale = unit === Infinity ? "" : fmt.kind === "Float" ? ", logarithmic beyond the smallest normal" : ", logarithmic";
  return `${close}${svg(all, place, marked, width, `All ${new Set(all).size} values from ${shown(all[0])} to ${shown(all.at(-1))}`, false)}
    <p class="note">Above: the values next to the number. Below: all ${new Set(all).size} finite values${scale}. ▼ the number, ● its nearest value.</p>`;
}

function svg(values, scale, { x, y }, width, label, close) {
  const low = scale(values[0]), span = scale(values.at(-1)) - low || 1, margin = 28, middle = 30;
  const at = (value) => (margin + ((scale(value) - low) / span) * (width - 2 * margin)).toFixed(1);
  const ticks = values.map((value) => `<line class="tick" x1="${at(value)}" x2="${at(value)}" y1="${middle - 7}" y2="${middle + 7}"/>`);
  let last = -Infinity;
  const named = close ? values : [values[0], ...(values[0] < 0 && values.at(-1) > 0 ? [0] : []), values.at(-1)];
  const labels = named.map((value) => {
    const text = shown(value), half = Math.min(4 * text.length, margin - 2);
    if (Number(at(value)) - 4 * text.length < last + 4 && value !== y) return "";
    last = Number(at(value)) + 4 * text.length;
    const place = Math.min(Math.max(Number(at(value)), 4 * text.length), width - 4 * text.length);
    return half ? `<text x="${place}" y="${middle + 24}">${text}</text>` : "";
  });
  const arrow = `<path class="number" d="M${at(x)} ${middle - 9} l-6 -12 h12 z"/>`;
  return `<svg role="img" aria-label="${label}" viewBox="0 0 ${width} 60" width="${width}" height="60"><line class="axis" x1="0" x2="${width}" y1="${middle}" y2="${middle}"/>
    ${ticks.join("")}${labels.join("")}<circle class="value" cx="${at(y)}" cy="${middle}" r="5.5"/>${arrow}</svg>`;
}

if (typeof document !== "undefined") document.querySelectorAll("[data-explorer]").forEach((root) => new Explorer(root));
