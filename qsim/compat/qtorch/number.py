"""QPyTorch's numbers: each is a format of qsim, and knows how tensors are rounded to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from qsim import scaling
from qsim.checks import check_input
from qsim.formats import Fixed, Float, Format
from qsim.formats.base import check_flag, check_integer
from qsim.functional import quantize
from qsim.rounding import Rounding

__all__ = ["Number", "FixedPoint", "BlockFloatingPoint", "FloatingPoint"]

Made = TypeVar("Made")


class Number:
    """What all numbers have in common. Make one of them: `FixedPoint`, `FloatingPoint` or `BlockFloatingPoint`.

    Example:
        >>> import torch
        >>> from qsim.compat import qtorch
        >>> numbers = qtorch.FixedPoint(8, 4), qtorch.FloatingPoint(4, 3), qtorch.BlockFloatingPoint(4)
        >>> [number.round(torch.tensor(0.3), "nearest").item() for number in numbers]
        [0.3125, 0.3125, 0.3125]
    """

    @property
    def format(self) -> Format:
        """The format of qsim that this is."""
        raise NotImplementedError

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:
        """Rounds a tensor.

        Args:
            x: The tensor.
            rounding: `"stochastic"`, `"nearest"`, or any other of qsim's.
            seed: See `qsim.quantize`.
            stream: See `qsim.quantize`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FixedPoint(Number):
    """Fixed point: whole numbers of `wl` bits, in steps of `2**-fl`.

    Args:
        wl: Bits of a number, 1 to 32.
        fl: How many of them stand behind the point.
        clamp: Whether there is a largest and a smallest number. Without, tensors are rounded to the steps alone.
        symmetric: Leave out the smallest number, so that the range is symmetric.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FixedPoint
        >>> FixedPoint(wl=4, fl=2).format.min, FixedPoint(wl=4, fl=2).format.max
        (-2.0, 1.75)
        >>> FixedPoint(wl=4, fl=2, clamp=False).round(torch.tensor([0.3, 100.4]), "nearest")
        tensor([  0.2500, 100.5000])
    """

    wl: int
    fl: int
    clamp: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_integer("FixedPoint", "wl", self.wl, 2 if self.symmetric is True else 1, 32)
        check_integer("FixedPoint", "fl", self.fl, -64, 64)
        check_flag("FixedPoint", "clamp", self.clamp)
        check_flag("FixedPoint", "symmetric", self.symmetric)

    @property
    def format(self) -> Fixed:
        """The format of qsim that this is, as far as the range goes."""
        return _fixed(self.wl, self.fl, self.symmetric)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:  # noqa: D102 (documented above)
        if self.clamp:
            return quantize(x, self.format, rounding=rounding, seed=seed, stream=stream)
        return self.round_to_steps(x, rounding, seed=seed, stream=stream)

    def round_to_steps(self, x: Tensor, rounding: str | Rounding, *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:
        """Rounds a tensor to steps of `2**-fl`, however large its numbers are."""
        check_input("FixedPoint", x)
        # The remainder of a division by two steps is exact, and has the number's parity and no more bits than it: all sums are exact.
        # The gradient goes through the remainder.
        remainder = torch.fmod(x, 2.0 ** (1 - self.fl))
        steps = quantize(remainder, _fixed(3, self.fl, True), rounding=rounding, seed=seed, stream=stream)
        return torch.where(x.isinf(), x, (x - remainder).detach() + steps)


@dataclass(frozen=True)
class FloatingPoint(Number):
    """Floating point, with subnormals. All codes are finite values, but for `exp=8`, where the top exponent is infinities and NaN.

    Args:
        exp: Bits of the exponent, 1 to 8.
        man: Bits of the mantissa, 0 to 23, without the one that goes without saying.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FloatingPoint
        >>> FloatingPoint(exp=5, man=2).format.max
        114688.0
        >>> FloatingPoint(exp=8, man=7).round(torch.tensor([3.14159]), "nearest")
        tensor([3.1406])
    """

    exp: int
    man: int

    def __post_init__(self) -> None:
        check_integer("FloatingPoint", "exp", self.exp, 1, 8)
        check_integer("FloatingPoint", "man", self.man, 0, 23)

    @property
    def format(self) -> Float:
        """The format of qsim that this is."""
        return _float(self.exp, self.man)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:
        """Rounds a tensor; what is finite stays so, and infinities stay infinities."""
        rounded = quantize(x, self.format, rounding=rounding, seed=seed, stream=stream)
        return torch.where(x.isinf(), x, rounded)


@dataclass(frozen=True)
class BlockFloatingPoint(Number):
    """Block floating point: whole numbers of `wl` bits under an exponent that they share, that of the largest of them.

    Args:
        wl: Bits of a number, 2 to 32; the range is symmetric.
        dim: There is an exponent for each index along this dimension; with -1 one for the whole tensor.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import BlockFloatingPoint
        >>> x = torch.tensor([[0.3, 1.7], [30.0, 0.3]])
        >>> BlockFloatingPoint(wl=4).round(x, "nearest")
        tensor([[ 0.,  0.],
                [28.,  0.]])
        >>> BlockFloatingPoint(wl=4, dim=0).round(x, "nearest")
        tensor([[ 0.2500,  1.7500],
                [28.0000,  0.0000]])
    """

    wl: int
    dim: int = -1

    def __post_init__(self) -> None:
        check_integer("BlockFloatingPoint", "wl", self.wl, 2, 32)
        check_integer("BlockFloatingPoint", "dim", self.dim, -1, 63)

    @property
    def format(self) -> Fixed:
        """The format of qsim that the numbers have under their exponent."""
        return _fixed(self.wl, self.wl - 2, True)

    @property
    def scale(self) -> scaling.Scaling:
        """The scale of qsim that the exponent is."""
        return _block_scale(self.dim)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:  # noqa: D102 (documented above)
        return quantize(x, self.format, rounding=rounding, scale=self.scale, seed=seed, stream=stream)


def _fixed(bits: int, fraction: int, symmetric: bool) -> Fixed:
    return _made(Fixed, bits, fraction, True, symmetric)


def _float(exponent: int, mantissa: int) -> Float:
    # With eight bits of exponent the top one is beyond float32's largest number.
    return _made(Float, exponent, mantissa, None, "ieee" if exponent == 8 else "none")


def _block_scale(dim: int) -> scaling.Scaling:
    return _made(scaling.Tensor, "e8m0", "floor") if dim == -1 else _made(scaling.Channel, dim, "e8m0", "floor")


def _made(kind: Callable[..., Made], *facts: int | str | None) -> Made:
    """Scripts make the same formats at every call; compiled code makes them once, and has no use for a cache."""
    if torch.compiler.is_compiling():
        return kind(*facts)
    made: Made = _kept(kind, *facts)
    return made


@lru_cache(maxsize=1024)
def _kept(kind: Callable[..., Any], *facts: int | str | None) -> Any:
    return kind(*facts)
