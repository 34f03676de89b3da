"""An optimizer's options for formats and roundings, checked and converted to parameters for the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from qsim.formats import Format, format as resolve_format, holders, name_of
from qsim.functional.arguments import cannot_hold
from qsim.optim import kahan
from qsim.optim.kahan import Kahan
from qsim.rounding import NAMED, NEAREST, Overflow, Rounding, Stochastic, check_overflow, overflow_in
from qsim.scaling import block_formats
from qsim.scaling.block_formats import Block
from qsim.text.parsing import read_call
from qsim_kernels.numbers.grid import Rule, read, spell

#: The dtypes that parameters may have.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Weights' format, update, moments' format, their rounding, arithmetic, overflow: the first arguments of `setting`.
Options = tuple[str | None, str, str | None, str, str, Overflow]

#: How weights are updated, as it is given.
Update = str | Rounding | Kahan

UPDATES = ("stochastic", "kahan", "nearest")
STATE_ROUNDINGS = ("nearest", "stochastic")
ARITHMETICS = ("float32", "format")


class UpdateSetting(NamedTuple):
    """The roundings of an update, as in `qsim_kernels.numbers.updates.Roundings` but as text, and the dtypes of the states.

    Attributes:
        grid: The weights' values.
        rule: How the new weight is rounded.
        inner: The values of the compensation, or of every intermediate.
        inner_rule: Round-to-nearest.
        state: The moments' values.
        state_rule: How moments are rounded.
        in_format: Whether every operation is rounded.
        kahan: Whether there is a compensation.
        state_dtype: The dtype of the moments.
        dtype: The dtype of the parameters and of the compensation.
        weight: The weights' format.
    """

    grid: str
    rule: str
    inner: str
    inner_rule: str
    state: str
    state_rule: str
    in_format: bool
    kahan: bool
    state_dtype: torch.dtype
    dtype: torch.dtype
    weight: Format

    @property
    def roundings(self) -> tuple[str, str, str, str, str, str, bool]:
        """The roundings, as the last arguments of the operator."""
        return self.grid, self.rule, self.inner, self.inner_rule, self.state, self.state_rule, self.in_format

    @property
    def draws(self) -> bool:
        """Whether random bits are drawn."""
        return any(read(Rule, rule).draws for rule in (self.rule, self.state_rule))


def name_of_format(fmt: str | torch.dtype | Format | None) -> str | None:
    """A format as a string for checkpoints, which `qsim.format` reads."""
    if fmt is None:
        return None
    if isinstance(fmt, (Block, str)) and isinstance(block_formats.resolve(fmt), Block):
        raise ValueError(f"optimizers round element by element: format and state are formats without scales, got {fmt!r}")
    found = resolve_format(fmt)
    return name_of(found)


def name_of_update(update: Update) -> str:
    """How weights are updated, as a string."""
    found = kahan.read(update) if isinstance(update, str) else update
    if isinstance(found, Kahan):
        return "kahan" if found == Kahan() else repr(found)
    return _name(update, "update", UPDATES)


def name_of_rounding(rounding: str | Rounding) -> str:
    """How moments are rounded, as a string."""
    return _name(rounding, "state_rounding", STATE_ROUNDINGS)


def _name(rounding: Update, argument: str, plain: tuple[str, ...]) -> str:
    if isinstance(rounding, Rounding) and rounding == NAMED["nearest"]:
        return "nearest"
    if isinstance(rounding, Stochastic):
        return repr(rounding) if rounding != Stochastic() else "stochastic"
    if isinstance(rounding, str) and (rounding in plain or isinstance(read_call(rounding, {"Stochastic": Stochastic}), Stochastic)):
        return rounding
    objects = " or a qsim.Stochastic(bits, correction)" + (" or qsim.optim.Kahan(rounding)" if argument == "update" else "")
    raise ValueError(f"{argument} must be {', '.join(map(repr, plain))}{objects}, got {rounding!r}")


@lru_cache(maxsize=256)
def setting(
    format: str | None, update: str, state: str | None, state_rounding: str, arithmetic: str, overflow: Overflow, dtype: torch.dtype
) -> UpdateSetting:
    """The setting for parameters of a dtype.

    Args:
        format: The weights' format, their dtype's own by default.
        update: "stochastic", "kahan", "nearest", "Stochastic(…)" or "Kahan(…)".
        state: The moments' format, by default the parameters' dtype's own.
        state_rounding: "nearest", "stochastic" or "Stochastic(…)".
        arithmetic: "float32" or "format".
        overflow: A mode of `qsim.rounding.Overflow`.
        dtype: The parameters' dtype.

    Raises:
        ValueError: If these are incompatible.
    """
    own = resolve_format(dtype)
    weights = own if format is None else resolve_format(format)
    if dtype not in holders(weights):
        raise ValueError(_too_wide("format", weights, f"parameters in {dtype}"))
    check_overflow(overflow)
    in_format, summation = arithmetic == "format", kahan.read(update)
    _check_arithmetic(arithmetic, weights, state, state_rounding)
    states = weights if in_format else own if state is None else resolve_format(state)
    return UpdateSetting(
        grid=weights.spelling[0],
        rule=spell(_rule(weights, update if summation is None else repr(summation.rounding), overflow)),
        inner=(weights if in_format else own).spelling[0],
        inner_rule=spell(_rule(weights if in_format else own, "nearest", overflow)),
        state=states.spelling[0],
        state_rule=spell(_rule(states, state_rounding, overflow)),
        in_format=in_format,
        kahan=summation is not None,
        state_dtype=_dtype_of(states, dtype),
        dtype=dtype,
        weight=weights,
    )


def _dtype_of(states: Format, dtype: torch.dtype) -> torch.dtype:
    """The parameters' dtype for moments that it holds, else the narrowest that does."""
    able = [able for able in (dtype, *DTYPES) if able in holders(states)]
    if not able:
        raise ValueError(_too_wide("state", states, "moments"))
    return able[0]


def _too_wide(name: str, fmt: Format, what: str) -> str:
    return f"{name}: {what} {cannot_hold(fmt, [dtype for dtype in DTYPES if dtype in holders(fmt)])}"


def _check_arithmetic(arithmetic: str, weights: Format, state: str | None, state_rounding: str) -> None:
    if arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic must be {' or '.join(map(repr, ARITHMETICS))}, got {arithmetic!r}")
    if arithmetic == "float32":
        return
    if state is not None and resolve_format(state) != weights:
        raise ValueError(f"arithmetic='format': the moments are in the weights' format {weights!r}, got state={state!r}")
    if state_rounding != "nearest":
        raise ValueError(f"arithmetic='format': every operation except the last rounds to nearest, got state_rounding={state_rounding!r}")
    if weights.grid.table:
        raise ValueError(f"arithmetic='format': operations are rounded to floats, integers or fixed point, not to a table like {weights!r}")
    # A result may first be rounded to twice the precision plus two bits without changing the final result.
    if 10 < weights.grid.mantissa < 23:
        raise ValueError(
            f"arithmetic='format': float32 has too few bits to compute with {weights!r}, which has {weights.precision} significant bits; "
            "it can compute with formats of up to 11, and with fp32"
        )


def _rule(fmt: Format, rounding: str, overflow: Overflow) -> Rule:
    """A rounding of float32 numbers."""
    overflow = overflow_in(fmt, overflow)
    stochastic = Stochastic() if rounding == "stochastic" else read_call(rounding, {"Stochastic": Stochastic})
    if not isinstance(stochastic, Stochastic) or fmt == resolve_format(torch.float32):
        # Rounding to float32 changes nothing.
        return NEAREST.rule(overflow)
    return stochastic.rule(overflow)
