"""QPyTorch's numbers: each has a qsim format and rounds tensors to it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from qsim import scaling
from qsim.formats import Fixed, Float, Format
from qsim.formats.base import check_flag, check_integer
from qsim.functional import quantize
from qsim.functional.arguments import check_input
from qsim.random.noise import Noise
from qsim.rounding import Rounding

__all__ = ["Number", "FixedPoint", "BlockFloatingPoint", "FloatingPoint"]

Made = TypeVar("Made")

#: The longest word length. Longer words would not round any float32.
LONGEST = 256

# Words of up to this length go through `quantize`: float32 holds all their values, and `Fixed` ends at 32 bits.
_QUANTIZED = {torch.float32: 25, torch.float64: 32}


class Number:
    """Base class of the numbers: `FixedPoint`, `FloatingPoint` and `BlockFloatingPoint`.

    Parameters can be changed at any time, and are checked as when the number was created. A quantizer reads its numbers at every call, so a
    change takes effect at its next call. As in QPyTorch, two numbers with equal parameters are different objects and do not compare equal.

    Example:
        >>> import torch
        >>> from qsim.compat import qtorch
        >>> numbers = qtorch.FixedPoint(8, 4), qtorch.FloatingPoint(4, 3), qtorch.BlockFloatingPoint(4)
        >>> [number.round(torch.tensor(0.3), "nearest").item() for number in numbers]
        [0.3125, 0.3125, 0.3125]
        >>> number = qtorch.FixedPoint(8, 4)
        >>> number.fl = 1
        >>> number.round(torch.tensor(0.3), "nearest").item()
        0.5
    """

    #: The names of the parameters, in order, which the subclasses have as dataclasses.
    __match_args__: tuple[str, ...] = ()

    @property
    def format(self) -> Format:
        """The qsim format of this number."""
        raise NotImplementedError

    def _check(self, **parameters: Any) -> None:
        """Check all parameters of a number."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a parameter, checked together with the others."""
        names = self.__match_args__
        if name in names and (name == names[-1] or names[-1] in self.__dict__):  # __init__ sets one after the other
            facts = {**self.__dict__, name: value}
            self._check(**{each: facts[each] for each in names})
        object.__setattr__(self, name, value)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:
        """Round a tensor.

        Args:
            x: The tensor.
            rounding: `"stochastic"`, `"nearest"`, or any other of qsim's.
            seed: See `qsim.quantize`.
            stream: See `qsim.quantize`.
        """
        raise NotImplementedError


@dataclass(eq=False)
class FixedPoint(Number):
    """Fixed point: integers of `wl` bits, in steps of `2**-fl`.

    Words of more than 25 bits have values that float32 lacks. A float32 tensor is still rounded to the multiples of `2**-fl`, each
    exactly, and the limits of the range are rounded to float32, as in QPyTorch. The same applies to float64 above 54 bits.

    Args:
        wl: Word length in bits, 1 to 256.
        fl: Number of fractional bits.
        clamp: Whether the range is limited. Without limits, tensors are only rounded to the steps.
        symmetric: Leave out the smallest number, so that the range is symmetric.

    Example:
        >>> import torch
        >>> from qsim.compat.qtorch import FixedPoint
        >>> FixedPoint(wl=4, fl=2).format.min, FixedPoint(wl=4, fl=2).format.max
        (-2.0, 1.75)
        >>> FixedPoint(wl=4, fl=2, clamp=False).round(torch.tensor([0.3, 100.4]), "nearest")
        tensor([  0.2500, 100.5000])
        >>> FixedPoint(wl=32, fl=16).round(torch.tensor([0.3, 1e9]), "nearest").tolist()
        [0.3000030517578125, 32768.0]
    """

    wl: int
    fl: int
    clamp: bool = True
    symmetric: bool = False

    def _check(self, **parameters: Any) -> None:
        check_integer("FixedPoint", "wl", parameters["wl"], 2 if parameters["symmetric"] is True else 1, LONGEST)
        check_integer("FixedPoint", "fl", parameters["fl"], -64, 64)
        check_flag("FixedPoint", "clamp", parameters["clamp"])
        check_flag("FixedPoint", "symmetric", parameters["symmetric"])

    @property
    def format(self) -> Fixed:
        """The number as a format of qsim, with its limits even if `clamp` is false. There is none for words of more than 32 bits."""
        return _fixed(self.wl, self.fl, symmetric=self.symmetric)

    def limits(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the smallest and the largest number, rounded to a dtype.

        Args:
            dtype: The dtype of the tensor that is rounded.

        Example:
            >>> import torch
            >>> from qsim.compat.qtorch import FixedPoint
            >>> FixedPoint(8, 4).limits(torch.float32), FixedPoint(32, 16).limits(torch.float32)
            ((-8.0, 7.9375), (-32768.0, 32768.0))
        """
        return _limits(self.wl, self.fl, dtype, symmetric=self.symmetric)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:  # noqa: D102 (documented above)
        check_input("FixedPoint", x)
        if not self.clamp:
            return self.round_to_steps(x, rounding, seed=seed, stream=stream)
        if not _is_long("FixedPoint", self.wl, x.dtype):
            return quantize(x, self.format, rounding=rounding, seed=Noise(seed, stream))
        return _clamped(self.round_to_steps(x, rounding, seed=seed, stream=stream), self.limits(x.dtype))

    def round_to_steps(self, x: Tensor, rounding: str | Rounding, *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:
        """Round a tensor to multiples of `2**-fl`, without limits."""
        check_input("FixedPoint", x)
        return _rounded_to_steps(x, self.fl, rounding, seed, stream)


@dataclass(eq=False)
class FloatingPoint(Number):
    """Floating point, with subnormals. All codes are finite values, except with `exp=8`, where the top exponent is infinities and NaN.

    Args:
        exp: Bits of the exponent, 1 to 8.
        man: Bits of the mantissa, 0 to 23, without the implicit one.

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

    def _check(self, **parameters: Any) -> None:
        check_integer("FloatingPoint", "exp", parameters["exp"], 1, 8)
        check_integer("FloatingPoint", "man", parameters["man"], 0, 23)

    @property
    def format(self) -> Float:
        """The qsim format of this number."""
        return _float(self.exp, self.man)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:
        """Round a tensor. Finite values stay finite, infinities stay infinities."""
        rounded = quantize(x, self.format, rounding=rounding, seed=Noise(seed, stream))
        return torch.where(x.isinf(), x, rounded)


@dataclass(eq=False)
class BlockFloatingPoint(Number):
    """Block floating point: integers of `wl` bits that share an exponent, that of the largest of them.

    Args:
        wl: Word length in bits, 2 to 256; the range is symmetric.
        dim: Each index along this dimension has its own exponent; with -1 the whole tensor shares one.

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

    def _check(self, **parameters: Any) -> None:
        check_integer("BlockFloatingPoint", "wl", parameters["wl"], 2, LONGEST)
        check_integer("BlockFloatingPoint", "dim", parameters["dim"], -1, 63)

    @property
    def format(self) -> Fixed:
        """The format of the integers, scaled to magnitudes below 2. There is none for words of more than 32 bits."""
        return _fixed(self.wl, self.wl - 2, symmetric=True)

    @property
    def scale(self) -> scaling.Scaling:
        """The shared exponent, as a scale of qsim."""
        return _block_scale(self.dim)

    def round(self, x: Tensor, rounding: str | Rounding = "stochastic", *, seed: int | Tensor | None = None, stream: int = 0) -> Tensor:  # noqa: D102 (documented above)
        check_input("BlockFloatingPoint", x)
        if not _is_long("BlockFloatingPoint", self.wl, x.dtype):
            return quantize(x, self.format, rounding=rounding, scale=self.scale, seed=Noise(seed, stream))
        # In float64, because float32 cannot hold a small number divided by a large block's power of two.
        powers = self._powers(x.detach().double())
        steps = _rounded_to_steps(x.double() / powers, self.wl - 2, rounding, seed, stream)
        return (_clamped(steps, _limits(self.wl, self.wl - 2, torch.float64, symmetric=True)) * powers).to(x.dtype)

    def _powers(self, x: Tensor) -> Tensor:
        """Return `2**floor(log2 a)` of each block's largest magnitude `a`: NaN if that is not finite, 1 if it is zero."""
        self.scale.tiles(x.shape)  # raises an error if the dimension is missing
        shared = [dim for dim in range(x.dim()) if dim != self.dim]
        if x.numel() == 0:
            return torch.ones_like(x)
        largest = x.abs().amax(shared, keepdim=True) if shared else x.abs()
        return torch.where(largest == 0, 1.0, largest / (2 * torch.frexp(largest).mantissa))


def _is_long(owner: str, wl: int, dtype: torch.dtype) -> bool:
    """Whether words have more bits than `quantize` takes. For shorter words, `quantize` checks whether bfloat16 and float16 hold them."""
    if dtype not in _QUANTIZED and wl > max(_QUANTIZED.values()):
        raise ValueError(f"{owner}: {dtype} cannot hold words of {wl} bits; float32 and float64 take words of up to {LONGEST}")
    return wl > _QUANTIZED.get(dtype, wl)


def _limits(wl: int, fl: int, dtype: torch.dtype, *, symmetric: bool) -> tuple[float, float]:
    """Return the limits of a fixed-point range, rounded to nearest in a dtype; beyond the dtype's range they are infinite."""
    facts = torch.finfo(dtype)
    power = wl - fl - 1
    top = math.ldexp(1.0, power) if power < math.frexp(facts.max)[1] else math.inf
    # One step below a power of two: the dtype has it, or it is rounded to the power.
    step = math.ldexp(1.0, -fl) if wl - 1 <= 2 - math.frexp(facts.eps)[1] else 0.0
    return (step - top if symmetric else -top), top - step


def _rounded_to_steps(x: Tensor, fl: int, rounding: str | Rounding, seed: int | Tensor | None, stream: int) -> Tensor:
    # The remainder of a division by two steps is exact, and has the number's parity and no more bits than it: all sums are exact.
    # The gradient goes through the remainder.
    remainder = torch.fmod(x, 2.0 ** (1 - fl))
    steps = quantize(remainder, _fixed(3, fl, symmetric=True), rounding=rounding, seed=Noise(seed, stream))
    return torch.where(x.isinf(), x, (x - remainder).detach() + steps)


def _clamped(x: Tensor, limits: tuple[float, float]) -> Tensor:
    """Clamp a tensor; the gradient passes straight through, except at infinities."""
    finite = torch.where(x.isfinite(), x, 0.0)
    return x.detach().clamp(*limits) + (finite - finite.detach())


def _fixed(bits: int, fraction: int, *, symmetric: bool) -> Fixed:
    return _made(Fixed, bits, fraction, True, symmetric)


def _float(exponent: int, mantissa: int) -> Float:
    # With eight bits of exponent the top one is beyond float32's largest number.
    return _made(Float, exponent, mantissa, None, "ieee" if exponent == 8 else "none")


def _block_scale(dim: int) -> scaling.Scaling:
    return _made(scaling.PerTensor, "e8m0", "floor") if dim == -1 else _made(scaling.PerAxis, dim, "e8m0", "floor")


def _made(kind: Callable[..., Made], *facts: int | str | None) -> Made:
    """Eager code creates the same formats at every call; compiled code creates them once, and needs no cache."""
    if torch.compiler.is_compiling():
        # When a word length has changed, it arrives here as a symbol; used as an index it becomes an integer, with a guard.
        return kind(*[operator.index(fact) if isinstance(fact, int) and not isinstance(fact, bool) else fact for fact in facts])
    made: Made = _kept(kind, *facts)
    return made


@lru_cache(maxsize=1024)
def _kept(kind: Callable[..., Any], *facts: int | str | None) -> Any:
    return kind(*facts)
