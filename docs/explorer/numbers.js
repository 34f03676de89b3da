// Numbers as readers type them, and as they are shown.

const WORDS = { nan: NaN, inf: Infinity, "+inf": Infinity, infinity: Infinity, "-inf": -Infinity, "-infinity": -Infinity };

/** The float32 number that a text means: a decimal, a quotient, a power such as 2^-9, float32's bits in hexadecimal, inf or nan. */
function number(text) {
  const word = text.trim().toLowerCase().replaceAll("−", "-").replaceAll("∞", "inf");
  if (Object.hasOwn(WORDS, word)) return WORDS[word];
  const bits = /^0x([0-9a-f]{1,8})$/.exec(word);
  if (bits) return single.from_bits(BigInt.asIntN(32, BigInt(word)));
  const value = quotient(word);
  if (Number.isNaN(value)) throw new Error(`“${text.trim()}” is not a number: type 0.3, 1e-4, 2^-9, 1/3, 0x3e99999a (float32's bits), inf or nan`);
  return Math.fround(value);
}

function quotient(word) {
  const parts = word.split("/").map(power);
  return parts.length === 2 ? parts[0] / parts[1] : parts.length === 1 ? parts[0] : NaN;
}

function power(word) {
  const found = /^([+-]?)(.+?)(?:\^|\*\*)(.+)$/.exec(word.trim());
  const decimal = (part) => (/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(part.trim()) ? Number(part) : NaN);
  return found ? (found[1] === "-" ? -1 : 1) * decimal(found[2]) ** decimal(found[3]) : decimal(word);
}

/** The fewest digits that mean a float32 number. */
function shown(x) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "NaN" : x > 0 ? "∞" : "-∞";
  if (Object.is(x, -0)) return "-0";
  for (let digits = 1; digits < 17; digits++) {
    const short = Number(x.toPrecision(digits));
    if (Math.fround(short) === x) return String(short);
  }
  return String(x);
}

const percent = (share) => `${(100 * share).toLocaleString("en", { maximumFractionDigits: 4 })} %`;
const hexadecimal = (code, bits) => `0x${code.toString(16).toUpperCase().padStart(Math.ceil(bits / 4), "0")}`;
