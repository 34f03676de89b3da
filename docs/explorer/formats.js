// Formats, as numbers that the emitted arithmetic takes. Nothing rounds here: see `emitted.js`, which `qsim emit javascript --format any` writes.

const USUAL = { Float: { bias: null, specials: "none", subnormals: true, signed: true }, Fixed: { signed: true, symmetric: false } };
const PARAMETERS = {
  Float: ["exponent", "mantissa", "bias", "specials", "subnormals", "signed"],
  PowerOfTwo: ["exponent", "bias"],
  Fixed: ["bits", "fraction", "signed", "symmetric"],
  Int: ["bits", "signed", "symmetric"],
};
const BIAS_LIMIT = 500;

/** The format with a name, a size such as `e3m2b4fn` or `int6`, or a call such as `Float(3, 2, bias=4)`. */
function format(text) {
  const spelling = text.trim(), name = spelling.toLowerCase();
  const known = Object.hasOwn(NAMES, name) ? read_call(NAMES[name]) : sized(name) ?? read_call(spelling);
  if (!known) throw new Error(`“${spelling}” is not a format: type ExMy (e4m3, e3m2b4fn), intN, a name, or Float(3, 2, bias=4)`);
  const made = { ...MAKERS[known.kind](known), spelling };
  const { grid } = made, step = Math.min(grid.least, 2 ** (grid.exponent - grid.mantissa));
  const significant = Math.min(grid.mantissa + 1, Math.floor(Math.log2(grid.max / step)) + 1);
  if (significant > 24 || grid.max >= 2 ** 128 || step < 2 ** -149) throw new Error(`“${spelling}” has values that float32 lacks`);
  return { ...made, ...in_bits(grid, made.coding) };
}

function sized(name) {
  let found = /^e(\d+)m(\d+)(?:b(\d+))?(ieee|fn|fnuz)?$/.exec(name);
  if (found) {
    const [exponent, mantissa] = [Number(found[1]), Number(found[2])];
    return { kind: "Float", ...USUAL.Float, exponent, mantissa, bias: found[3] ? Number(found[3]) : null, specials: found[4] ?? "none" };
  }
  found = /^(u?)int(\d+)$/.exec(name);
  return found && { kind: "Fixed", ...USUAL.Fixed, bits: Number(found[2]), fraction: 0, signed: !found[1] };
}

function read_call(text) {
  const found = /^\s*(Float|Fixed|Int|PowerOfTwo)\s*\(([^()]*)\)\s*$/.exec(text);
  if (!found) return null;
  const names = PARAMETERS[found[1]], given = {};
  found[2].split(",").filter((part) => part.trim()).forEach((part, place) => {
    const [, name, value] = /^\s*(?:(\w+)\s*=)?\s*(.*?)\s*$/.exec(part), chosen = name ?? names[place];
    if (!names.includes(chosen)) throw new Error(`${found[1]} has no parameter ${name ?? `number ${place + 1}`}: it takes ${names.join(", ")}`);
    given[chosen] = literal(value);
  });
  const kind = found[1] === "Int" ? "Fixed" : found[1], whole = found[1] === "Int" ? { fraction: 0 } : {};
  return { kind, ...USUAL[kind], ...whole, ...given };
}

function literal(text) {
  if (/^[+-]?\d+$/.test(text)) return Number(text);
  const quoted = /^(['"])(\w*)\1$/.exec(text), words = { True: true, False: false, None: null };
  if (quoted) return quoted[2];
  if (!Object.hasOwn(words, text)) throw new Error(`“${text}” is not a number, string, True, False or None`);
  return words[text];
}

function check(name, value, low, high) {
  if (!Number.isInteger(value) || value < low || value > high) throw new Error(`${name} must be in ${low}…${high}, got ${value ?? "nothing"}`);
}

const MAKERS = {
  Float({ exponent, mantissa, bias, specials, subnormals, signed }) {
    check("exponent bits", exponent, 1, 8);
    check("mantissa bits", mantissa, 0, 23);
    bias ??= 2 ** (exponent - 1) - (specials === "fnuz" ? 0 : 1);
    check("bias", bias, -BIAS_LIMIT, BIAS_LIMIT);
    const width = exponent + mantissa, ones = 2 ** width - 1, whole = 2 ** mantissa;
    const top = { ieee: ones - whole, fn: ones - 1, fnuz: ones, none: ones }[specials];
    if (top === undefined) throw new Error(`specials must be ieee, fn, fnuz or none, got ${specials}`);
    if (specials === "fnuz" && !signed) throw new Error("fnuz writes NaN as negative zero, which an unsigned format lacks");
    if (![true, false, "flush"].includes(subnormals)) throw new Error(`subnormals must be True, False or 'flush', got ${subnormals}`);
    const gradual = subnormals === true, field = Math.floor(top / whole), fraction = top % whole, lowest = 1 - bias;
    if (top === 0 || (field === 0 && !gradual)) throw new Error("this format has no value but zero: every other code is reserved");
    const max = field === 0 ? fraction * 2 ** (lowest - mantissa) : (whole + fraction) * 2 ** (field - bias - mantissa);
    const nan = { ieee: mantissa ? ones : -1, fn: ones, fnuz: 2 ** width, none: -1 }[specials];
    const infinity = specials === "ieee" ? top + 1 : -1;
    return {
      kind: "Float", exponent, mantissa, bias, signed,
      grid: {
        mantissa, exponent: lowest, least: 2 ** (gradual ? lowest - mantissa : lowest), max, min: signed ? -max : 0,
        zero: true, negative_zero: signed && specials !== "fnuz", infinity: infinity >= 0,
        flush: subnormals === "flush",
      },
      coding: { bits: width + Number(signed), twos_complement: false, nan, infinity },
    };
  },
  PowerOfTwo({ exponent, bias }) {
    check("exponent bits", exponent, 2, 8);
    bias ??= 2 ** (exponent - 1) - 1;
    check("bias", bias, -BIAS_LIMIT, BIAS_LIMIT);
    const nan = 2 ** exponent - 1, least = 2 ** -bias;
    return {
      kind: "PowerOfTwo", exponent, mantissa: 0, bias, signed: false,
      grid: { mantissa: 0, exponent: -bias, least, max: 2 ** (nan - 1 - bias), min: least, zero: false, negative_zero: false, infinity: false },
      coding: { bits: exponent, twos_complement: false, nan, infinity: -1 },
    };
  },
  Fixed({ bits, fraction, signed, symmetric }) {
    check("bits", bits, 1, 32);
    check("fraction", fraction, -BIAS_LIMIT, BIAS_LIMIT);
    if (symmetric && (!signed || bits === 1)) throw new Error("a symmetric format is signed and has at least 2 bits");
    const mantissa = bits - Number(signed), least = 2 ** -fraction, max = (2 ** mantissa - 1) * least;
    if (max === 0) throw new Error("1 bit with a sign has no positive value");
    return {
      kind: "Fixed", fraction, signed,
      grid: {
        mantissa, exponent: mantissa - fraction, least, max, min: !signed ? 0 : symmetric ? -max : -(2 ** mantissa) * least,
        zero: true, negative_zero: false, infinity: false,
      },
      coding: { bits, twos_complement: true, nan: -1, infinity: -1 },
    };
  },
};

/** A format's numbers in float64's bits: `grid_bits` and `coding_bits` of the library. */
function in_bits(grid, coding) {
  const { MANTISSA, BIAS, INFINITY, MAGNITUDE, to_bits } = double, pattern = (x) => to_bits(Math.abs(x));
  const mantissa = BigInt(grid.mantissa), field = BigInt(grid.exponent) + BIAS, signed = grid.min < 0;
  const flush = Boolean(grid.flush), gradual = !flush && grid.zero && grid.least === 2 ** (grid.exponent - grid.mantissa);
  const overflow = grid.infinity ? INFINITY : MAGNITUDE;
  const numbers = {
    shift: MANTISSA - mantissa, low: gradual ? field : 0n, least: pattern(grid.least), half: pattern(grid.least / 2),
    parity: ((field - mantissa - BigInt(grid.zero)) & 1n) << MANTISSA,
    top: pattern(grid.max), bottom: signed ? pattern(grid.min) : 0n, floor: pattern(grid.min),
    over: overflow, under: signed ? overflow : MAGNITUDE,
  };
  const symmetric = signed && numbers.top === numbers.bottom;
  const known = { flat: false, zero: grid.zero, signed, keep_sign: grid.negative_zero, symmetric, open: false, flush };
  const last = BigInt(largest_code(grid, coding)), bits = BigInt(coding.bits);
  const code_numbers = {
    shift: numbers.shift, lowest: field, before: (field - BigInt(grid.zero)) << mantissa, least: pattern(2 ** (grid.exponent - grid.mantissa)),
    most: maximum(numbers.top, numbers.bottom), sign: 1n << (bits - 1n), mask: (1n << (bits - BigInt(signed && !coding.twos_complement))) - 1n,
    last, infinity: BigInt(coding.infinity), nan: coding.nan >= 0 ? BigInt(coding.nan) : last,
  };
  const code_facts = {
    twos_complement: coding.twos_complement, zero: grid.zero, subnormals: grid.zero && grid.least < 2 ** grid.exponent, signed,
    infinity: coding.infinity >= 0, nan_is_zero: signed && coding.nan === 2 ** (coding.bits - 1),
  };
  return { bits: coding.bits, numbers, known, code_numbers, code_facts };
}

function largest_code(grid, coding) {
  if (coding.twos_complement) return grid.max / grid.least;
  if (grid.max < 2 ** grid.exponent) return grid.max / 2 ** (grid.exponent - grid.mantissa);
  const power = Math.floor(Math.log2(grid.max)), whole = 2 ** grid.mantissa;
  return (power - grid.exponent + Number(grid.zero)) * whole + (grid.max / 2 ** power - 1) * whole;
}

/** A number rounded to a format. `random` is an integer of as many bits as stochastic rounding draws. */
function quantize(x, fmt, rounding = "nearest", overflow = "saturate", random = 0, bits = 32) {
  const rule = overflow === "format" ? (fmt.grid.infinity ? "nonfinite" : "saturate") : overflow;
  const used = { keep: 0xffffffffn, correction: 0n };
  const drawn = double.rounding.random_bits(BigInt(random) << BigInt(32 - bits), used);
  const variant = { ...fmt.known, mode: MODES[rounding], overflow: OVERFLOWS[rule] };
  return double.from_bits(double.rounding.round_bits(double.to_bits(x), drawn, fmt.numbers, variant));
}

/** The code of a value of a format. */
function encode(value, fmt) {
  const code = double.codes.code_of(double.to_bits(value), fmt.code_numbers, fmt.code_facts);
  return Number(code & ((1n << BigInt(fmt.bits)) - 1n));
}

/** The value of a code. */
function decode(code, fmt) {
  return double.from_bits(double.codes.value_of(BigInt(code), fmt.code_numbers, fmt.code_facts));
}

/** The share of random integers with which stochastic rounding gives the neighbour of larger magnitude: exact, by bisection. */
function chance(x, fmt, overflow = "saturate", bits = 32) {
  const at = (random) => quantize(x, fmt, "stochastic", overflow, random, bits), count = 2 ** bits;
  const [below, above] = [at(0), at(count - 1)];
  if (Object.is(below, above)) return { below, above, up: 0 };
  let [low, high] = [0, count - 1];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (Object.is(at(middle), below)) low = middle;
    else high = middle;
  }
  return { below, above, up: (count - high) / count };
}

/** Numbers rounded under scales that blocks of neighbours share, in float32: `qsim.Block` of the library. */
function quantize_blocks(values, fmt, size, scale_format, rule, rounding = "nearest") {
  const { MANTISSA, BIAS, to_bits, from_bits, scales } = double;
  const { grid } = fmt, largest = to_bits(grid.max), top = Math.floor(Math.log2(grid.max));
  const significant = grid.mantissa - Math.max(0, grid.exponent - top);
  const making = {
    largest, factor: to_bits(1), power: BIAS - (largest >> MANTISSA), spare: MANTISSA - BigInt(significant),
    least: to_bits(Math.max(scale_format.grid.least, 2 ** -127)), grid: { ...scale_format.numbers, ...(scale_format.grid.zero ? {} : { half: -1n }) },
  };
  const mode = rule === "ceil" ? MODES.up : MODES.nearest;
  const variant = { mode, overflow: OVERFLOWS.saturate, flat: false, zero: true, signed: false, keep_sign: false, symmetric: true, open: false };
  const blocks = [];
  for (let start = 0; start < values.length; start += size) {
    const x = values.slice(start, start + size).map(Math.fround), amax = Math.max(...x.map(Math.abs));
    const scale = Math.fround(from_bits(scales.scale_of(to_bits(amax), 0n, making, RULES[rule], variant)));
    blocks.push({ scale, elements: x.map((each) => scaled(each, scale, fmt, rounding)) });
  }
  return blocks;
}

function scaled(x, scale, fmt, rounding) {
  const { to_bits, from_bits, product, scales, INFINITY } = single, bits = to_bits(x);
  let divided = product(bits, scales.inverse(to_bits(scale)));
  if (["up", "down", "odd"].includes(rounding)) divided = scales.kept_from_zero(divided, bits);
  const element = quantize(from_bits(divided), fmt, rounding);
  return { x, element, code: encode(element, fmt), value: from_bits(scales.saturated(product(to_bits(element), to_bits(scale)), INFINITY - 1n)) };
}
