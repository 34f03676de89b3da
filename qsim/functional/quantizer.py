"""Quantizers: format, rounding and overflow in one frozen, callable value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from qsim import rounding as _rounding
from qsim.formats import Format, name_of
from qsim.functional import quantize
from qsim.functional.arguments import Spelling, check_input, spelling
from qsim.functional.hadamard import Hadamard, resolve as resolve_transform
from qsim.rounding import NEAREST, Overflow, Rounding, Stochastic
from qsim.scaling import Scaling, block_formats, resolve as resolve_scale
from qsim.scaling.block_formats import Block


@dataclass(frozen=True)
class Quantizer:
    """The rounding of a tensor at one point: to a format, with or without scales.

    Args:
        format: A name, a torch dtype or a `Format`; kept as a `Format`. For a block format, its element format and its scale are kept.
        rounding: A name or a `Rounding`; kept as a `Rounding`.
        overflow: `"saturate"`; `"saturate_symmetric"`; `"nonfinite"`; or `None`, the usual one: values saturate, except gradients that a
            layer rounds without a scale. They overflow to infinity, or to NaN in a format without one, so that loss scaling notices.
        clip_gradient: Make the gradient zero where a value is beyond the format's range.
        scale: How values are scaled before rounding: one of the kinds in `qsim.scaling`, its `repr`, or `"tensor"`; `None` for no scaling.
        transform: Applied before scaling and rounding: a `qsim.transforms.Hadamard`, or its `repr`. It is not undone: in a product of two
            operands it cancels.

    Example:
        >>> import torch, qsim
        >>> spec = qsim.Quantizer("e4m1", rounding="stochastic")
        >>> spec
        Quantizer(format=Float(4, 1), rounding=Stochastic(), overflow=None, clip_gradient=False, scale=None, transform=None)
        >>> spec(torch.tensor([1.0, 1.5, 2.0]))
        tensor([1.0000, 1.5000, 2.0000])
    """

    format: Format
    rounding: Rounding
    overflow: Overflow | None = None
    clip_gradient: bool = False
    scale: Scaling | None = None
    transform: Hadamard | None = None

    #: The arguments for the operators, computed once for all calls. Not a field, because it follows from the fields.
    spelt: ClassVar[Spelling]

    def __init__(
        self,
        format: str | torch.dtype | Format | Block,
        rounding: str | Rounding = NEAREST,
        *,
        scale: str | Scaling | None = None,
        transform: str | Hadamard | None = None,
        overflow: Overflow | None = None,
        clip_gradient: bool = False,
    ) -> None:
        if overflow is not None:
            _rounding.check_overflow(overflow)
        if not isinstance(clip_gradient, bool):
            raise TypeError(f"Quantizer: clip_gradient must be True or False, got {clip_gradient!r}")
        element, scaling = block_formats.resolve(format), resolve_scale(scale)
        if isinstance(element, Block):
            if scaling is not None:
                raise ValueError(f"Quantizer: {format!r} has scales of its own, got scale={scale!r}")
            scaling, element = element.along(-1), element.element
        if scaling is not None and clip_gradient:
            raise ValueError("Quantizer: clip_gradient=True is for formats without scales: under scales there is no range to leave")
        turning = resolve_transform(transform)
        if turning is not None and clip_gradient:
            raise ValueError("Quantizer: clip_gradient=True: after a transform no element is beyond the range by itself")
        object.__setattr__(self, "format", element)
        object.__setattr__(self, "rounding", _rounding.resolve(rounding))
        object.__setattr__(self, "overflow", overflow)
        object.__setattr__(self, "clip_gradient", clip_gradient)
        object.__setattr__(self, "scale", scaling)
        object.__setattr__(self, "transform", turning)
        object.__setattr__(self, "spelt", spelling(self.format, self.rounding, self.usual_overflow))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Objects pickled by older versions, with fewer attributes, get the missing ones here.
        Quantizer.__init__(self, **{field.name: state[field.name] for field in fields(self) if field.name in state})

    @property
    def usual_overflow(self) -> Overflow:
        """The overflow mode wherever no layer decides otherwise."""
        return self.overflow or "saturate"

    def as_gradient(self) -> Quantizer:
        """The rounding of a gradient: without a scale it overflows, unless this quantizer says that it saturates."""
        return self if self.overflow is not None or self.scale is not None else replace(self, overflow="nonfinite")

    def to_dict(self) -> dict[str, Any]:
        """The quantizer as plain strings and booleans, for a configuration file; `Quantizer(**…)` restores it.

        Example:
            >>> import qsim
            >>> qsim.Quantizer("e4m1", qsim.Stochastic(bits=6)).to_dict()
            {'format': 'Float(4, 1)', 'rounding': 'Stochastic(bits=6)', 'clip_gradient': False}
        """
        name = name_of(self.format)
        rounding = repr(self.rounding) if isinstance(self.rounding, Stochastic) else str(self.rounding)
        found: dict[str, Any] = {"format": name, "rounding": rounding}
        found |= {"overflow": self.overflow} if self.overflow is not None else {}
        found |= {"clip_gradient": self.clip_gradient}
        found |= {"scale": repr(self.scale)} if self.scale is not None else {}
        return found | ({"transform": repr(self.transform)} if self.transform is not None else {})

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
        """Round a tensor; the arguments are those of `quantize`.

        A transform is applied along the dimension of the blocks, or along the last one.
        """
        if self.transform is not None:
            check_input("quantize", x)
            dtype = x.dtype if dtype is None and out is None else dtype
            x = self.transform.wide(x, getattr(self.scale, "dim", -1))
        return quantize(
            x,
            self.format,
            rounding=self.rounding,
            overflow=self.usual_overflow,
            clip_gradient=self.clip_gradient,
            scale=self.scale,
            generator=generator,
            seed=seed,
            stream=stream,
            offset=offset,
            dtype=dtype,
            out=out,
        )


#: A specification of a rounding: a quantizer, a format (round-to-nearest), or `None` for no rounding.
Point = Quantizer | str | torch.dtype | Format | Block | None


#: The points of gradients, in layers and in `nn.Quantize`.
GRADIENTS = ("grad", "grad_w", "backward")


def check_call(name: str, point: Quantizer) -> None:
    """Raise an error for a subclass with a rounding of its own where it is not called: its numbers decide how tensors are rounded."""
    if type(point).__call__ is not Quantizer.__call__:
        kind = type(point).__name__
        raise TypeError(
            f"{name}: {kind} has a __call__ of its own, which would be ignored here: give a qsim.Quantizer, or call {kind} yourself"
        )


def is_stochastic(point: Quantizer | str | None) -> bool:
    """Whether a point draws random bits."""
    return isinstance(point, Quantizer) and point.spelt.is_stochastic


def short(point: Quantizer, name: str = "") -> str:
    """A short description of a quantizer, at the point with a name: format, scales, transform, settings other than the usual ones."""
    facts = point.to_dict()
    usual = "nonfinite" if name in GRADIENTS and point.scale is None else "saturate"
    details = [facts["rounding"]] if facts["rounding"] != "nearest" else []
    details += [point.usual_overflow] if point.usual_overflow != usual else []
    details += ["clip_gradient"] if facts["clip_gradient"] else []
    details += [f"after hadamard({point.transform.size})"] if point.transform is not None else []
    return " ".join([_name(point, facts["format"]), *details])


def _name(point: Quantizer, element: str) -> str:
    """The block format's name if element and scale form one; else the name of the format, and its scale."""
    if point.scale is None:
        return element
    kinds = block_formats.NAMED.items()
    of_block = (name for name, spec in kinds if (spec.element, spec.along(getattr(point.scale, "dim", -1))) == (point.format, point.scale))
    return next(of_block, f"{element} {point.scale}")
