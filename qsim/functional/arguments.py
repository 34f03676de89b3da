"""Argument checks before any work, and the conversion of formats and roundings to the operators' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from qsim import rounding
from qsim.formats import Format, format as resolve_format, holders
from qsim.formats.base import shortest
from qsim.formats.dtypes import FLOATS
from qsim.functional.tracing import refuse_tracing
from qsim.private import storage_number
from qsim.rounding import Rounding
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators


def check_model(owner: str, model: object) -> None:
    """Raise an error if a value is not a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: model must be a torch.nn.Module, got {model!r}")


class Spelling(NamedTuple):
    """A format and a rounding, in the form that the operators take.

    Attributes:
        format: The format.
        grid: Its values.
        coding: Its codes.
        rule: The rounding and the overflow mode.
        is_stochastic: Whether the rounding needs a seed.
        holders: The dtypes that hold every value.
    """

    format: Format
    grid: str
    coding: str
    rule: str
    is_stochastic: bool
    holders: list[torch.dtype]


def spelling(format: str | torch.dtype | Format, how: str | Rounding, overflow: str) -> Spelling:
    """Resolve and checks a format, a rounding and an overflow mode."""
    if torch.compiler.is_compiling():
        return _spelling(format, how, overflow)
    try:
        return _known_spelling(format, how, overflow)
    except (TypeError, AttributeError):
        # Arguments without a hash are invalid; without the cache they raise a clear error.
        return _spelling(format, how, overflow)


def _spelling(format: str | torch.dtype | Format, how: str | Rounding, overflow: str) -> Spelling:
    fmt, chosen = resolve_format(format), rounding.resolve(how)
    rounding.check_overflow(overflow)
    return Spelling(fmt, *fmt.spelling, chosen.spelling[rounding.overflow_in(fmt, overflow)], chosen.is_stochastic, holders(fmt))


_known_spelling = lru_cache(maxsize=4096)(_spelling)


def check_input(name: str, x: Tensor) -> Operators:
    """Raise an error unless a tensor is dense and floating-point; return the operators for it."""
    ops = operators(x)
    if ops is DISPATCHED:
        refuse_tracing(name, x)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: x must be a tensor, got {type(x).__name__}")
        if not torch.compiler.is_compiling() and x.layout != torch.strided:  # compiled backward passes cannot ask
            raise TypeError(f"{name}: x must be dense, got layout {x.layout}; call x.to_dense() first")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: x must be float32, bfloat16, float16 or float64, got {x.dtype}")
    return ops


def refuse_dtype(spelt: Spelling, dtype: torch.dtype, name: str) -> NoReturn:
    """Say why a dtype is not one of those that hold a format."""
    if dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {dtype}; encode() gives codes")
    raise ValueError(f"{name}: {dtype} {cannot_hold(spelt.format, spelt.holders)}")


def cannot_hold(fmt: Format, able: Sequence[torch.dtype]) -> str:
    """The error text for a dtype that cannot hold a format, given the dtypes that can."""
    facts = f"largest {shortest(fmt.max)}, smallest {shortest(fmt.smallest)}, {fmt.precision} significant bits"
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in able) or "no dtype"
    return f"cannot hold every value of {fmt!r} ({facts}); {names} can"


def check_out(x: Tensor, out: object, dtype: torch.dtype | None) -> None:
    """Raise an error if a result does not fit into `out`."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, got {type(out).__name__}")
    if dtype is not None and dtype != out.dtype:
        raise ValueError(f"dtype={dtype} contradicts out=, which is {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, x has {tuple(x.shape)}: they must be the same")
    if out.device != x.device:
        raise ValueError(f"out is on {out.device}, x on {x.device}: they must be on the same device")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError("out= gives no gradients: leave it out, or call this under torch.no_grad()")
    if overlaps(out):
        raise ValueError("several elements of out share one place in memory (an expanded tensor)")
    if not torch.compiler.is_compiling() and _shares(x, out):
        raise ValueError("out and x overlap in memory at different offsets: give another out, or x.clone()")


def overlaps(x: Tensor) -> bool:
    """Whether several elements may share one place in memory: a step along one dimension stays within those along the narrower ones."""
    if torch.compiler.is_compiling():
        return False  # compiled code has no memory yet
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _shares(x: Tensor, out: Tensor) -> bool:
    """Whether two tensors reach into the same memory without being the same."""
    if storage_number(x) != storage_number(out) or not x.numel() or x.is_set_to(out):
        return False
    start, end = _reach(x)
    out_start, out_end = _reach(out)
    return start < out_end and out_start < end


def _reach(x: Tensor) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """The first byte of a tensor in its storage, and the one after its last."""
    first = x.storage_offset()
    last = first + sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return first * x.element_size(), (last + 1) * x.element_size()
