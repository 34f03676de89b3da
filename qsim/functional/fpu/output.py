"""The rounding of operators' outputs to a unit's format, where their dtype allows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from qsim.formats import Format, format as resolve_format
from qsim.formats.dtypes import FLOATS
from qsim.functional.arguments import cannot_hold, spelling
from qsim.functional.straight_through import rounded
from qsim.random import seeds, streams
from qsim.rounding import Overflow, Rounding
from qsim_kernels.ops.direct import operators

_OWN = {dtype: resolve_format(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}


@dataclass(frozen=True)
class SeedSource:
    """The source of seeds for stochastic rounding: a given seed, a given generator, or torch's own generator.

    Attributes:
        seed: The seed; each operator uses its own stream of it, starting with `stream`.
        stream: See `seed`.
        generator: The source of each operator's seed if none is given; by default torch's own, with a stream for each rank.
    """

    seed: int | Tensor | None = None
    stream: int = 0
    generator: torch.Generator | None = None
    _number: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def next(self, device: torch.device) -> tuple[Tensor, int]:
        """The seed and the stream of the next operator's random bits."""
        seed = seeds.seed_tensor(self.seed, self.generator, device)
        if self.seed is None and self.generator is None:
            return seed, streams.rank_stream(self.stream)
        number = 0 if self.seed is None else next(self._number)
        return seed, streams.stream("fpu", self.stream, number) if number else self.stream


@dataclass(frozen=True)
class Output:
    """A unit's rounding of its outputs.

    Attributes:
        format: The unit's format.
        rounding: The rounding of numbers between two of its values.
        overflow: The treatment of numbers beyond the largest value.
        noise: The source of random bits.
    """

    format: Format
    rounding: Rounding
    overflow: Overflow
    noise: SeedSource

    def leaves(self, x: Tensor) -> bool:
        """Whether a tensor stays unchanged: it is not floating-point, or its dtype has rounded it to the format itself.

        Raises:
            ValueError: If its numbers cannot be rounded to the format, or would be rounded twice. (Operators such as `+` would replace
                a TypeError by one without explanation.)
        """
        dtype = x.dtype.to_real()
        if not dtype.is_floating_point or x.device.type == "meta":
            return True
        if x.layout != torch.strided:
            raise ValueError(f"fpu: operators must return dense tensors, got layout {x.layout}; give embeddings sparse=False")
        name = str(x.dtype).removeprefix("torch.")
        if _OWN.get(dtype) == self.format:
            if str(self.rounding) != "nearest" or self.overflow != "nonfinite":
                raise ValueError(f"fpu: operators on {name} round to nearest by themselves: to round otherwise, compute in a wider dtype")
            return True
        if dtype not in FLOATS:
            raise ValueError(f"fpu: an operator must return float32 or float64, or {self.format!r} itself, got {name}")
        spelt = spelling(self.format, self.rounding, self.overflow)
        if dtype not in spelt.holders:
            raise ValueError(
                f"fpu: an operator returned {name}, which {cannot_hold(self.format, spelt.holders)}; call .float() on the model"
            )
        if dtype.itemsize == 2:
            raise ValueError(f"fpu: {name} rounds by itself, and {self.format!r} after it would be a second rounding: compute in float32")
        return False

    def of(self, x: Any) -> Any:
        """An operator's output, rounded; its gradient passes straight through."""
        if not isinstance(x, Tensor) or self.leaves(x):
            return x
        if x.is_complex():
            return torch.view_as_complex(self._rounded(torch.view_as_real(x.resolve_conj())))
        return self._rounded(x)

    def into(self, x: Tensor) -> None:
        """Round what an operator wrote into a tensor."""
        if not self.leaves(x):
            x.copy_(self.of(x))

    def _rounded(self, x: Tensor) -> Tensor:
        spelt = spelling(self.format, self.rounding, self.overflow)
        seed, stream = self.noise.next(x.device) if spelt.is_stochastic else (None, 0)
        return rounded(operators(x), x, spelt, seed, stream, 0, x.dtype, None)
