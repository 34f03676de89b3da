"""From the arguments of a call to what the operators take: element format, rounding and scale."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.compiler import is_dynamo_compiling

from qsim.formats import Format
from qsim.formats.base import check_flag
from qsim.functional.arguments import Spelling, spelling
from qsim.rounding import Rounding
from qsim.scaling import Scaling, block_formats, resolve
from qsim.scaling.block_formats import Block


def resolved(
    format: str | torch.dtype | Format | Block,
    rounding: str | Rounding,
    overflow: str,
    scale: object,
    dim: int | None,
    clip_gradient: bool = False,
) -> tuple[Spelling, Scaling | None]:
    """Resolve the element format, the rounding and the scale, if any; cached if a name or a format specifies them completely."""
    if scale is None and not is_dynamo_compiling():
        try:
            return _known(format, rounding, overflow, None, dim, clip_gradient)
        except (TypeError, AttributeError):
            pass  # it has no hash: the checks below raise a clearer error than the cache
    return _found(format, rounding, overflow, scale, dim, clip_gradient)


def _found(
    format: str | torch.dtype | Format | Block, rounding: str | Rounding, overflow: str, scale: object, dim: int | None, clip_gradient: bool
) -> tuple[Spelling, Scaling | None]:
    element, scaling = _element_and_scale(format, scale, dim, clip_gradient)
    return spelling(element, rounding, overflow), scaling


_known = lru_cache(maxsize=4096, typed=True)(_found)


def _element_and_scale(
    format: str | torch.dtype | Format | Block, scale: object, dim: int | None, clip_gradient: bool
) -> tuple[Format, Scaling | None]:
    check_flag("quantize", "clip_gradient", clip_gradient)
    element = block_formats.resolve(format)
    if isinstance(element, Block):
        if scale is not None:
            raise ValueError(f"{format!r} has scales of its own, got scale={scale!r}")
        scale, element = element.along(-1 if dim is None else dim), element.element
    elif dim is not None:
        why = f"{format!r} has no blocks" if scale is None else "the scale sets its own dimension"
        raise ValueError(f"dim is for block formats, and {why}; got dim={dim!r}")
    if scale is None:
        return element, None
    if not isinstance(scale, (Scaling, str)):
        raise TypeError(f"scale must be one of qsim.scaling's, got {scale!r}")
    if clip_gradient:
        raise ValueError("clip_gradient=True is for formats without scales: under scales there is no range to leave")
    return element, resolve(scale)
