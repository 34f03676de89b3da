"""`qsim inspect`: numbers in a format, exactly."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, get_args

from qsim.cli.blocks import InBlock, in_block
from qsim.cli.exact import Neighbours, TypedNumber, code_of, neighbours, parse
from qsim.cli.text import fields, hexadecimal, json_number, show
from qsim.formats import FP64, Format, name_of
from qsim.formats.base import shortest
from qsim.rounding import DEFAULT_BITS, NAMED, Overflow, Stochastic, resolve
from qsim.scaling import block_formats
from qsim.scaling.block_formats import Block
from qsim.text.columns import aligned

HELP = "show a number in a format under each rounding"
DESCRIPTION = (
    "Show a number's neighbours in a format, what each rounding makes of it, and the codes.\n"
    "The number counts as written: 0.3 is three tenths, not the float32 next to it.\n"
    "In a block format the numbers are one block: each is shown divided by the scale that this block gets."
)
EXAMPLES = """\
examples:
  qsim inspect e4m3 0.3                        neighbours, every rounding, probabilities, codes
  qsim inspect e4m3 -0.3 1/3 0x1.8p-3 inf nan  several numbers, negative ones too
  qsim inspect e4m3 0.3 --bits 6               stochastic rounding with six random bits
  qsim inspect bf16 3.14159 --rounding odd     one rounding only; may be repeated
  qsim inspect mxfp4 0.3 -0.1 6                numbers that share a block: its scale, and each one under it
  qsim inspect e2m1 0.3 --json                 the same as JSON
"""

_MODES: tuple[Overflow, ...] = get_args(Overflow)
_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


def shield_negatives(words: Sequence[str]) -> list[str]:
    """Put a blank before negative numbers, because argparse treats `-1e-5` or `-inf` as an option."""
    return [f" {word}" if words[0] == "inspect" and _NEGATIVE.match(word) else word for word in words]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    command.add_argument("format", metavar="FORMAT", help="such as e4m3, bf16, e5m7ieee, int8; `qsim formats` lists those with a name")
    command.add_argument(
        "values", metavar="VALUE", nargs="+", help="such as 0.3, -1e-5, 1/3, 0x1.8p-3, inf, nan; in a block format they share a block"
    )
    command.add_argument("--rounding", action="append", metavar="NAME", help=f"only this one of {', '.join(NAMED)}")
    command.add_argument(
        "--bits", action="append", type=int, default=[], metavar="R", help="also with this number of random bits (1 to 32)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    fmt = block_formats.resolve(args.format)
    if fmt == FP64:
        raise ValueError(f"inspect: numbers are read as float64, so that nothing is rounded to {args.format}: give a narrower format")
    roundings = [str(name) for name in args.rounding or NAMED]
    for name in roundings:
        resolve(name)
    draws = [Stochastic(DEFAULT_BITS), *(Stochastic(bits, c) for bits in args.bits for c in (False, True))]
    if "stochastic" not in roundings:
        draws = []
    plain = [name for name in roundings if name != "stochastic"]
    numbers = [parse(text) for text in args.values]
    if isinstance(fmt, Block):
        found = in_block(numbers, fmt, args.format)
        return show(block_text(found, fmt, args.format, plain, draws), block_json(found, fmt, plain, draws), as_json=args.json)
    text = "\n\n".join(as_text(x, fmt, args.format, plain, draws) for x in numbers)
    return show(text, {"format": repr(fmt), "values": [as_json(x, fmt, plain, draws) for x in numbers]}, as_json=args.json)


def as_text(x: TypedNumber, fmt: Format, name: str, plain: Sequence[str], draws: Sequence[Stochastic], scale: float | None = None) -> str:
    """The description of a number, for people; with a scale, also the scaled results."""
    where = neighbours(x, fmt)
    title = f"{x.text} in {repr(fmt) if name == repr(fmt) else f'{name} = {fmt!r}'}"
    blocks = ["\n".join([title, *_neighbour_lines(x, fmt, where)])]
    if plain:
        blocks.append(_rounding_table(x, fmt, plain, scale))
    if draws:
        blocks.append(_stochastic_table(x, fmt, where, draws))
    return "\n\n".join(blocks)


def block_text(found: InBlock, fmt: Block, name: str, plain: Sequence[str], draws: Sequence[Stochastic]) -> str:
    """The description of numbers that share a block, for people: the scale, and each number divided by it in the elements' format."""
    title = f"{', '.join(x.text for x in found.numbers)} in a block of {repr(fmt) if name == repr(fmt) else f'{name} = {fmt!r}'}"
    if found.scale != found.scale:
        return f"{title}\n  scale  nan: a number that is not finite makes NaN of its whole block"
    code = f"  {_code_text(found.scale, fmt.scale)}" if fmt.scale.bits <= 8 else ""
    lines = [title, f"  scale  {shortest(found.scale)}{code}, from the largest magnitude, that of {found.largest.text}"]
    if found.outer is not None:
        product = f"elements are multiplied by {shortest(found.factor)}"
        lines.append(f"  outer  {shortest(found.outer)}, the scale of a tensor that consists of this block; {product}")
    texts = (as_text(x, fmt.element, name_of(fmt.element), plain, draws, found.factor) for x in found.elements())
    return "\n\n".join(["\n".join(lines), *texts])


def block_json(found: InBlock, fmt: Block, plain: Sequence[str], draws: Sequence[Stochastic]) -> dict[str, Any]:
    """The description of numbers that share a block, for programs: `values` are of elements, numbers divided by the scale."""
    outer = None if found.outer is None else json_number(found.outer)
    facts = {"format": repr(fmt), "scale": _json_value(found.scale, fmt.scale), "outer": outer, "factor": json_number(found.factor)}
    if found.scale != found.scale:
        return {**facts, "values": None}
    return {**facts, "values": [as_json(x, fmt.element, plain, draws, found.factor) for x in found.elements()]}


def _neighbour_lines(x: TypedNumber, fmt: Format, where: Neighbours) -> list[str]:
    if x.exact is None:
        return [f"  {'not a number' if x.carrier != x.carrier else 'an infinity'}; {_code_text(x.carrier, fmt)}"]
    if where.position == 0:
        return [f"  a value of the format; {_code_text(where.inner, fmt)}"]
    rows = []
    for word, neighbour, end in (("below", where.below, "smallest"), ("above", where.above, "largest")):
        # As wide as the word "position" below.
        cells = ["none", f"beyond the {end} value"] if neighbour is None else [shortest(neighbour), _code_text(neighbour, fmt)]
        rows.append([word.ljust(8), *cells])
    lines = [aligned(rows, indent="  ")]
    if where.position is not None:
        way = f"of the way from {shortest(where.inner)} to {shortest(where.outer)}"
        lines.append(f"  position  {_fraction_text(where.position)} {way}")
    return lines


def _rounding_table(x: TypedNumber, fmt: Format, plain: Sequence[str], scale: float | None) -> str:
    saturated = [x.rounded(fmt, name) for name in plain]
    nonfinite = [x.rounded(fmt, name, "nonfinite") for name in plain]
    overflows = _overflows(x, fmt)
    rows = [["rounding", "saturate", "code", "nonfinite", "code"] if overflows else ["rounding", "result", "code"]]
    rows[0] += [] if scale is None else [f"{rows[0][1]} × scale"]
    for name, value, other in zip(plain, saturated, nonfinite, strict=True):
        more = [shortest(other), _code_text(other, fmt)] if overflows else []
        more += [] if scale is None else [shortest(value * scale)]
        rows.append([name, shortest(value), _code_text(value, fmt), *more])
    return aligned(rows, indent="  ")


def _stochastic_table(x: TypedNumber, fmt: Format, where: Neighbours, draws: Sequence[Stochastic]) -> str:
    if not where.position:
        condition = " where overflow saturates" if _overflows(x, fmt) else ""
        return f"  stochastic  always {shortest(x.rounded(fmt, 'stochastic'))}{condition}"
    rows = [["stochastic", f"probability of {shortest(where.outer)}", f"else {shortest(where.inner)}; mean"]]
    for draw, probability in _probabilities(where, draws):
        label = f"{draw.bits} bits" + (", corrected" if draw.correction else "")
        odds = f"{probability * 2 ** (draw.bits or 0)}/2^{draw.bits} = {shortest(float(probability))}"
        rows.append([label, odds, shortest(float(where.mean(probability)))])
    return aligned(rows, indent="  ")


def _overflows(x: TypedNumber, fmt: Format) -> bool:
    """Whether the overflow mode affects any rounding."""
    pairs = ((x.rounded(fmt, name), x.rounded(fmt, name, "nonfinite")) for name in NAMED if name != "stochastic")
    # As text, because NaN differs from itself.
    return any(repr(saturated) != repr(nonfinite) for saturated, nonfinite in pairs)


def _probabilities(where: Neighbours, draws: Sequence[Stochastic]) -> Iterator[tuple[Stochastic, Fraction]]:
    for draw in draws:
        probability = where.outer_probability(draw)
        if probability is not None:
            yield draw, probability


def _code_text(value: float, fmt: Format) -> str:
    code = code_of(value, fmt)
    return "no code" if code is None else f"{fields(code, fmt)}  {hexadecimal(code, fmt)}"


def _fraction_text(value: Fraction) -> str:
    decimal = f"{float(value):.10g}"
    # A fraction longer than this is less readable than its decimal.
    return f"{value} = {decimal}" if value.denominator < 10**9 else f"about {decimal}"


def as_json(x: TypedNumber, fmt: Format, plain: Sequence[str], draws: Sequence[Stochastic], scale: float | None = None) -> dict[str, Any]:
    """The description of a number, for programs. Fractions are strings, and so are values that JSON lacks."""
    where = neighbours(x, fmt)
    rounded = {mode: {name: x.rounded(fmt, name, mode) for name in plain} for mode in _MODES}
    scaled = {} if scale is None else {"scaled": {name: json_number(value * scale) for name, value in rounded["saturate"].items()}}
    return {
        "value": x.text,
        "below": _json_value(where.below, fmt),
        "above": _json_value(where.above, fmt),
        "position": None if where.position is None else str(where.position),
        "rounded": {mode: {name: _json_value(value, fmt) for name, value in found.items()} for mode, found in rounded.items()},
        **scaled,
        "stochastic": [
            {
                "bits": draw.bits,
                "correction": draw.correction,
                "outer": json_number(where.outer),
                "inner": json_number(where.inner),
                "probability_of_outer": str(probability),
                "mean": str(where.mean(probability)),
            }
            for draw, probability in _probabilities(where, draws)
        ],
    }


def _json_value(value: float | None, fmt: Format) -> dict[str, Any] | None:
    if value is None:
        return None
    code = code_of(value, fmt)
    return {"value": json_number(value), "code": code, "binary": None if code is None else fields(code, fmt)}
