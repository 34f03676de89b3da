"""Accumulators by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from qsim.accumulators.aligned import Aligned
from qsim.accumulators.base import Accumulator, brief, labelled
from qsim.accumulators.block_scaled import BlockScaled
from qsim.accumulators.promoted import Promoted
from qsim.accumulators.rounded import Rounded
from qsim.accumulators.two_step import TwoStep
from qsim.accumulators.units import CHECKED, UNITS
from qsim.formats import format as resolve_format
from qsim.text.columns import aligned
from qsim.text.parsing import read_call
from qsim_kernels.private import constant

_PROMOTED = "against torch._scaled_mm with use_fast_accum=False on an H200"
#: Every named accumulator.
NAMED: dict[str, Accumulator] = {
    "h100_fp8": UNITS["h100_fp8"].accumulator,
    "h100_fp8_promoted": Promoted("h100_fp8", 128),
    **{name: unit.accumulator for name, unit in UNITS.items()},
}
#: For each, whether the model was checked against the chip, and with what; or the paper that it comes from.
EVIDENCE: dict[str, tuple[str, str]] = {
    **{name: (unit.evidence, unit.source) for name, unit in UNITS.items()},
    "h100_fp8_promoted": (CHECKED, _PROMOTED),
}

for _name, _known in NAMED.items():
    labelled(_known, _name)

_MAKERS: dict[str, Callable[..., Accumulator]] = {kind.__name__: kind for kind in (Rounded, Aligned, TwoStep, BlockScaled, Promoted)}


def resolve(accumulator: str | Accumulator) -> Accumulator:
    """Return an accumulator by its name, or by the call that creates it.

    Args:
        accumulator: For example `"h100_fp8"` or `"Rounded('fp16', chunk=64)"`; an `Accumulator` is returned unchanged.

    Raises:
        TypeError: If it has the wrong type.
        ValueError: If no accumulator has that name.

    Example:
        >>> from qsim import accumulators
        >>> accumulators.resolve("h100_fp8_promoted")
        Promoted('h100_fp8', 128)
    """
    if isinstance(accumulator, Accumulator):
        return accumulator
    if not isinstance(accumulator, str):
        raise TypeError(f"an accumulator must be a name or one of qsim.accumulators' values, got {accumulator!r}")
    found = NAMED.get(accumulator.lower()) or read_call(accumulator, _MAKERS)
    if found is not None:
        return found
    if _are_sums(accumulator):
        raise ValueError(f"unknown accumulator {accumulator!r}: that is a format; Rounded({accumulator!r}) rounds every sum to it")
    close = difflib.get_close_matches(accumulator.lower(), NAMED, n=1)
    hint = f"did you mean {close[0]!r}? There are" if close else "there are"
    raise ValueError(f"unknown accumulator {accumulator!r}: {hint} {', '.join(NAMED)}, and calls of {', '.join(_MAKERS)}")


def _are_sums(fmt: str) -> bool:
    """Whether sums can be rounded to what a text names."""
    try:
        Rounded(fmt)
    except (TypeError, ValueError):
        return False
    return True


def sum_text(accumulator: str, a: str, b: str) -> str:
    """The text that the operator takes, from those of an accumulator and of its operands' formats."""
    return resolve(accumulator).spelled(resolve_format(a), resolve_format(b))


def text_takes(accumulator: str, fmt: str) -> bool:
    """`Accumulator.takes`, from the texts of both."""
    return resolve(accumulator).takes(resolve_format(fmt))


def units_text(accumulator: str) -> str:
    """The formats that an accumulator takes, as words, from its text; it takes any if there are none."""
    unit = resolve(accumulator)
    return f"{name_of(unit)} takes {' or '.join(map(brief, unit.taken or ()))}"


# Under torch.compile the results are constants; calls cannot be parsed there.
constant(resolve)
constant(sum_text)
constant(text_takes)
constant(units_text)


def name_of(accumulator: Accumulator) -> str:
    """Return the name of an accumulator, or its `repr` if it has none.

    Example:
        >>> from qsim import accumulators
        >>> accumulators.name_of(accumulators.Promoted("h100_fp8", 128))
        'h100_fp8_promoted'
    """
    return accumulator.label or next((name for name, known in NAMED.items() if known == accumulator), repr(accumulator))


def listing(width: int | None = None) -> str:
    """A list of all named accumulators, with the call that creates each and what is known about the model.

    Args:
        width: Wrap lines that are longer.

    Example:
        >>> from qsim import accumulators
        >>> print(accumulators.listing().splitlines()[1])
        h100_fp8           Aligned(32, 13, out='e8m13ieee', operands=('e4m3', 'e5m2'))  checked on the chip
    """
    rows = [["name", "accumulator", "model"], *([name, repr(known), EVIDENCE[name][0]] for name, known in NAMED.items())]
    return aligned(rows, width=width)
