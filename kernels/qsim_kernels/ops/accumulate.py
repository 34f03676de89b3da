"""The operator that multiplies matrices with an accumulator: schema, fake implementation, an emulator per backend, or the chip itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.chip.verified import CHIP, finished
from qsim_kernels.numbers.sums import Sum, is_single, is_stochastic, read_sum
from qsim_kernels.ops.backend import OnBackend, library, one_by_one, schema_of

#: The dtypes of operands: everything that float32 holds.
OPERANDS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


class AccumulateArguments(NamedTuple):
    """The operator's arguments.

    Attributes:
        a: The left matrices.
        b: The right matrices.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum, spelled.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first random number.
        dtype: The dtype to which results are rounded to nearest; by default that of the sum.
        chip: Whether the chip itself multiplies, where its bits are the emulator's: `"auto"`, where it can, `"never"`, or `"require"`.
        bias: Added in the sum's dtype to each row before it is rounded, if given.
    """

    a: Tensor
    b: Tensor
    seed: Tensor | None
    how: str
    stream: int
    offset: int
    dtype: torch.dtype | None = None
    chip: str = "auto"
    bias: Tensor | None = None

    def checked(self) -> Sum:
        """The sum's description; raise an error for operands that do not fit."""
        a, b, bias = self.a, self.b, self.bias
        if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
            raise ValueError(f"accumulate: cannot multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")
        for operand in (a, b):
            if operand.dtype not in OPERANDS:
                raise TypeError(f"accumulate: operands must be float32 or narrower floats, got {operand.dtype}")
        if bias is not None and bias.shape != b.shape[-1:]:
            raise ValueError(f"accumulate: bias must have {b.shape[-1]} elements in one dimension, got shape {tuple(bias.shape)}")
        adder = read_sum(self.how)
        if is_stochastic(adder) and self.seed is None:
            raise ValueError("accumulate: stochastic rounding needs a seed")
        return adder

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's."""
        return *self.a.shape[:-1], self.b.shape[-1]


class Implementation(OnBackend):
    """The operator on one backend, whose `accumulate_into(out, a, b, sum, noise)` fills a contiguous result."""

    def accumulate(
        self,
        a: Tensor,
        b: Tensor,
        seed: Tensor | None,
        how: str,
        stream: int,
        offset: int,
        dtype: torch.dtype | None = None,
        chip: str = "auto",
        bias: Tensor | None = None,
    ) -> Tensor:
        """The product of matrices `[…, M, K]` and `[…, K, N]` with equal batch dimensions; see `AccumulateArguments`."""
        if chip != "never":
            product = CHIP.at_once(a, b, how, dtype, bias)
            if product is not None:
                return product
        return self._accumulated(AccumulateArguments(a, b, seed, how, stream, offset, dtype, chip, bias))

    def _accumulated(self, given: AccumulateArguments) -> Tensor:
        adder = given.checked()
        if given.chip != "never" and given.a.numel() and given.b.numel():
            asked = given.a, given.b, given.how, given.dtype, given.bias
            product = CHIP.multiply(*asked, lambda x, y: self._emulated(given._replace(a=x, b=y), adder))
            if isinstance(product, Tensor):
                return product
            if given.chip == "require":
                raise RuntimeError(f"accumulate: chip='require': {product}")
        return finished(self._emulated(given, adder), given.bias, given.dtype or _own_dtype(adder))

    def _emulated(self, given: AccumulateArguments, adder: Sum) -> Tensor:
        out = given.a.new_empty(given.shape, dtype=_own_dtype(adder))
        self._backend.accumulate_into(out, given.a, given.b, adder, (given.seed, given.stream, given.offset))
        return out


def computed_on_chip(sums: Iterable[str], rows: int, columns: int, device: torch.device) -> list[bool]:
    """Whether the chip computes them, for all kinds of products with a matrix of a shape that it has been asked for; see `outcomes`."""
    return CHIP.outcomes(sums, rows, columns, device)


def multiplied_by(*arguments: Any, **options: Any) -> str:
    """Return what multiplied when the operator ran with these arguments: `chip`, `emulator`, or nothing on the meta device."""
    given = AccumulateArguments(*arguments, **options)
    if given.a.is_meta:
        return ""
    return "emulator" if given.chip == "never" or CHIP.obstacle(given.a, given.b, given.how, given.dtype, given.bias) else "chip"


def _own_dtype(adder: Sum) -> torch.dtype:
    """The dtype that holds every value of a sum."""
    return torch.float32 if is_single(adder) else torch.float64


def _fake(*arguments: Any) -> Tensor:
    given = AccumulateArguments(*arguments)
    return given.a.new_empty(given.shape, dtype=given.dtype or _own_dtype(given.checked()))


library.define(schema_of(Implementation("").accumulate), tags=(torch.Tag.pt2_compliant_tag,))
Implementation.register(
    {"accumulate": _fake},
    reference="qsim_kernels.torch.sums",
    compiled="qsim_kernels.numba.sums",
    triton="qsim_kernels.triton.accumulate.launch",
)
torch.library.register_vmap("qsim::accumulate", one_by_one("accumulate"), lib=library)
