"""Quantizers: format, rounding and overflow in one frozen, callable value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from qsim import rounding as _rounding
from qsim.formats import Format, name_of
from qsim.formats.base import check_flag
from qsim.functional import quantize
from qsim.functional.arguments import Spelling, check_input, check_out, spelling
from qsim.functional.hadamard import Hadamard, resolve as resolve_transform
from qsim.random.noise import Noise
from qsim.rounding import NEAREST, Overflow, Rounding, Stochastic
from qsim.scaling import Scaling, block_formats, resolve as resolve_scale
from qsim.scaling.block_formats import Block

#: When a stochastic point of a layer draws again.
Redraw = Literal["auto", "call", "step"]


@dataclass(frozen=True)
class Quantizer:
    """A way to round a tensor: the format, the rounding, and the scales, if any.

    Args:
        format: A name, a torch dtype or a `Format`; kept as a `Format`. For a block format, its element format and its scale are kept.
        rounding: A name or a `Rounding`; kept as a `Rounding`.
        scale: How values are scaled before rounding: one of the kinds in `qsim.scaling`, its `repr`, or `"tensor"`; `None` for no scaling.
        transform: Applied before scaling and rounding, along the dimension of the blocks or the last one: a `qsim.transforms.Hadamard`, or
            its `repr`. A call undoes it after rounding; in a layer it cancels in the product of two operands.
        overflow: A mode of `qsim.rounding.Overflow`; `None` is the usual one of what is rounded:
            operands saturate, gradients without a scale overflow, so that loss scaling notices, and optimizers follow the format.
        clip_gradient: Make the gradient zero where a value is beyond the format's range.
        redraw: When stochastic rounding draws again in a layer: `"call"`, at every call; `"step"`, only when a step has changed the tensor,
            which is possible for weights; `"auto"`, per step for weights and per call for everything else. A quantizer that is called
            itself always draws again.

    Example:
        >>> import torch, qsim
        >>> spec = qsim.Quantizer("e4m1", rounding="stochastic")
        >>> spec
        Quantizer(format=Float(4, 1), rounding=Stochastic(), scale=None, transform=None, overflow=None, clip_gradient=False, redraw='auto')
        >>> spec(torch.tensor([1.0, 1.5, 2.0]))
        tensor([1.0000, 1.5000, 2.0000])
    """

    format: Format
    rounding: Rounding
    scale: Scaling | None = None
    transform: Hadamard | None = None
    overflow: Overflow | None = None
    clip_gradient: bool = False
    redraw: Redraw = "auto"

    # The arguments for the operators, computed once for all calls. Not a field, because it follows from the fields.
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
        redraw: Redraw = "auto",
    ) -> None:
        if overflow is not None:
            _rounding.check_overflow(overflow)
        check_flag("Quantizer", "clip_gradient", clip_gradient)
        if redraw not in get_args(Redraw):
            raise ValueError(f"Quantizer: redraw must be {', '.join(map(repr, get_args(Redraw)))}, got {redraw!r}")
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
        object.__setattr__(self, "redraw", redraw)
        object.__setattr__(self, "spelt", spelling(self.format, self.rounding, self.usual_overflow))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Objects pickled by older versions, with fewer attributes, get the missing ones here.
        Quantizer.__init__(self, **{field.name: state[field.name] for field in fields(self) if field.name in state})

    @property
    def usual_overflow(self) -> Overflow:
        """The overflow mode wherever no layer or optimizer decides otherwise: `"saturate"` or `"nonfinite"`."""
        return _rounding.overflow_in(self.format, self.overflow or "saturate")

    def as_gradient(self) -> Quantizer:
        """Return the quantizer for a gradient: without a scale it overflows, unless this one says that it saturates."""
        return self if self.overflow is not None or self.scale is not None else replace(self, overflow="nonfinite")

    def to_dict(self) -> dict[str, Any]:
        """Return the quantizer as plain strings and booleans, for a configuration file; `Quantizer(**…)` restores it.

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
        found |= {"transform": repr(self.transform)} if self.transform is not None else {}
        return found | ({"redraw": self.redraw} if self.redraw != "auto" else {})

    def __call__(
        self,
        x: Tensor,
        *,
        generator: torch.Generator | None = None,
        seed: int | Tensor | Noise | None = None,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Round a tensor; the arguments are those of `quantize`.

        With a transform, its elements are those that are rounded, and the result, transformed back, is rounded to `dtype`.
        """
        if self.transform is None:
            return self._round(x, generator, seed, dtype, out)
        check_input("quantize", x)
        if out is not None:
            check_out(x, out, dtype)
            dtype = out.dtype
        dim = getattr(self.scale, "dim", -1)
        rounded = self._round(self.transform.wide(x, dim), generator, seed, None, None)
        result = self.transform.inverse(rounded, dim).to(x.dtype if dtype is None else dtype)
        return result if out is None else out.copy_(result)

    def _round(
        self,
        x: Tensor,
        generator: torch.Generator | None,
        seed: int | Tensor | Noise | None,
        dtype: torch.dtype | None,
        out: Tensor | None,
    ) -> Tensor:
        """Round a tensor's own elements."""
        return quantize(
            x,
            self.format,
            rounding=self.rounding,
            overflow=self.usual_overflow,
            clip_gradient=self.clip_gradient,
            scale=self.scale,
            generator=generator,
            seed=seed,
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


def is_stochastic(point: object) -> bool:
    """Whether a point draws random bits from a seed; of callables, those with an attribute `is_stochastic` say so."""
    return point.spelt.is_stochastic if isinstance(point, Quantizer) else bool(getattr(point, "is_stochastic", False))


def short(point: Quantizer, name: str = "") -> str:
    """A short description of a quantizer, at the point with a name: format, scales, transform, settings other than the usual ones."""
    facts = point.to_dict()
    usual = "nonfinite" if name in GRADIENTS and point.scale is None else "saturate"
    details = [facts["rounding"]] if facts["rounding"] != "nearest" else []
    details += [point.usual_overflow] if point.usual_overflow != usual else []
    details += ["clip_gradient"] if facts["clip_gradient"] else []
    details += [f"after hadamard({point.transform.size})"] if point.transform is not None else []
    details += [f"drawn per {point.redraw}"] if point.redraw != "auto" else []
    return " ".join([_name(point, facts["format"]), *details])


def _name(point: Quantizer, element: str) -> str:
    """The block format's name if element and scale form one; else the name of the format, and its scale."""
    if point.scale is None:
        return element
    kinds = block_formats.NAMED.items()
    of_block = (name for name, spec in kinds if (spec.element, spec.along(getattr(point.scale, "dim", -1))) == (point.format, point.scale))
    return next(of_block, f"{element} {point.scale}")
