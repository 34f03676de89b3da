"""A quantizer: format, rounding and overflow in one frozen value that can be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsim import rounding as _rounding
from qsim.formats import Format, format as resolve_format, names
from qsim.functional import quantize
from qsim.rounding import NEAREST, Overflow, Rounding, Stochastic


@dataclass(frozen=True)
class Quantizer:
    """What happens to a tensor at one point: rounding to a format.

    Args:
        format: A name, a torch dtype or a `Format`; kept as a `Format`.
        rounding: A name or a `Rounding`; kept as a `Rounding`.
        overflow: `"saturate"` or `"nonfinite"`.
        clip_gradient: Make the gradient zero where a value lies beyond the format's range.
        scale: How values are scaled before they are rounded. `None`: they are not.

    Example:
        >>> import torch, qsim
        >>> spec = qsim.Quantizer("e4m1", rounding="stochastic")
        >>> spec
        Quantizer(format=Float(4, 1), rounding=Stochastic(), overflow='saturate', clip_gradient=False, scale=None)
        >>> spec(torch.tensor([1.0, 1.5, 2.0]))
        tensor([1.0000, 1.5000, 2.0000])
    """

    format: Format
    rounding: Rounding
    overflow: Overflow = "saturate"
    clip_gradient: bool = False
    scale: None = None

    def __init__(
        self,
        format: str | torch.dtype | Format,
        rounding: str | Rounding = NEAREST,
        overflow: Overflow = "saturate",
        clip_gradient: bool = False,
        scale: None = None,
    ) -> None:
        _rounding.check_overflow(overflow)
        if not isinstance(clip_gradient, bool):
            raise TypeError(f"Quantizer: clip_gradient must be True or False, got {clip_gradient!r}")
        if scale is not None:
            raise TypeError(f"Quantizer: scale must be None, got {scale!r}")
        object.__setattr__(self, "format", resolve_format(format))
        object.__setattr__(self, "rounding", _rounding.resolve(rounding))
        object.__setattr__(self, "overflow", overflow)
        object.__setattr__(self, "clip_gradient", clip_gradient)
        object.__setattr__(self, "scale", scale)

    def to_dict(self) -> dict[str, Any]:
        """The quantizer in plain strings and booleans, as a configuration file has it; `Quantizer(**…)` makes it again.

        Example:
            >>> import qsim
            >>> qsim.Quantizer("e4m1", qsim.Stochastic(bits=6)).to_dict()
            {'format': 'Float(4, 1)', 'rounding': 'Stochastic(bits=6)', 'overflow': 'saturate', 'clip_gradient': False}
        """
        name = next(iter(names(self.format)), repr(self.format))
        rounding = repr(self.rounding) if isinstance(self.rounding, Stochastic) else str(self.rounding)
        return {"format": name, "rounding": rounding, "overflow": self.overflow, "clip_gradient": self.clip_gradient}

    def __call__(
        self,
        x: Tensor,
        *,
        generator: torch.Generator | None = None,
        seed: int | Tensor | None = None,
        stream: int = 0,
        offset: int = 0,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rounds a tensor; the arguments are those of `quantize`."""
        return quantize(
            x,
            self.format,
            rounding=self.rounding,
            overflow=self.overflow,
            clip_gradient=self.clip_gradient,
            generator=generator,
            seed=seed,
            stream=stream,
            offset=offset,
            dtype=dtype,
            out=out,
        )


#: What may stand where something is rounded or is not: a quantizer, a format to round to nearest, or nothing.
Point = Quantizer | str | torch.dtype | Format | None


def is_stochastic(point: Quantizer | str | None) -> bool:
    """Whether a point draws random bits."""
    return isinstance(point, Quantizer) and point.rounding.is_stochastic


def short(point: Quantizer) -> str:
    """What a point does, in as few words as tell it: the format, and what is not as usual."""
    facts = point.to_dict()
    details = [facts["rounding"]] if facts["rounding"] != "nearest" else []
    details += [facts["overflow"]] if facts["overflow"] != "saturate" else []
    details += ["clip_gradient"] if facts["clip_gradient"] else []
    return " ".join([facts["format"], *details])
