"""The operators that multiply matrices with an accumulator: schema, fake implementation, an emulator per backend, or the chip itself.

`accumulate_rows` sums rows with the same index, as the gradient of a lookup does: sums of equal length are a batch of products with ones,
so that each device adds them as fast as it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.chip.verified import CHIP, finished
from qsim_kernels.numbers.sums import BlockScaledSum, PromotedSum, Sum, is_single, is_stochastic, noise_indices, read_sum
from qsim_kernels.ops.backend import OnBackend, define, library, one_by_one, operator, schema_of
from qsim_kernels.torch.sums import ChainScales, accumulate_scaled_into

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
        _check_shapes("accumulate", a, b)
        for operand in (a, b):
            if operand.dtype not in OPERANDS:
                raise TypeError(f"accumulate: operands must be float32 or narrower floats, got {operand.dtype}")
        if bias is not None and bias.shape != b.shape[-1:]:
            raise ValueError(f"accumulate: bias must have {b.shape[-1]} elements in one dimension, got shape {tuple(bias.shape)}")
        adder = read_sum(self.how)
        if is_stochastic(adder) and self.seed is None:
            raise ValueError("accumulate: stochastic rounding needs a seed")
        return adder


def _fake(*arguments: Any) -> Tensor:
    given = AccumulateArguments(*arguments)
    return given.a.new_empty((*given.a.shape[:-1], given.b.shape[-1]), dtype=given.dtype or _own_dtype(given.checked()))


class Implementation(OnBackend):
    """The operators on one backend, whose `accumulate_into(out, a, b, sum, noise, scales=None)` fills a contiguous result."""

    @operator("", _fake, vmap=one_by_one)
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
        out = given.a.new_empty((*given.a.shape[:-1], given.b.shape[-1]), dtype=_own_dtype(adder))
        self._backend.accumulate_into(out, given.a, given.b, adder, (given.seed, given.stream, given.offset))
        return out

    @operator("", lambda a, b, p, q, shared, seed, how, *_: _result(a, b, p, q, shared, how)[0])
    def accumulate_scaled(
        self,
        a: Tensor,
        b: Tensor,
        scales_a: Tensor,
        scales_b: Tensor,
        shared: Sequence[int],
        seed: Tensor | None,
        how: str,
        stream: int,
        offset: int,
        chip: str = "auto",
    ) -> Tensor:
        """The product of matrices `[…, M, K]` and `[…, K, N]` with scales of their short sums; see `qsim_kernels.numbers.sums`.

        Args:
            a: The left matrices.
            b: The right matrices.
            scales_a: The scales of the left operand, `[…, lines, sums]`.
            scales_b: Those of the right operand.
            shared: How many rows and how many short sums share a scale of the left operand, and how many columns and short sums one of
                the right operand.
            seed: A 0-d int64 tensor, needed only for stochastic rounding.
            how: A promoted or a block-scaled sum, spelled; the groups of the latter are its short sums.
            stream: Which of the seed's streams of random bits to use.
            offset: Logical index of the first random number.
            chip: Whether the chip itself may compute the short sums, as for `accumulate`.
        """
        out, described = _result(a, b, scales_a, scales_b, shared, how)
        left, right = ChainScales(scales_a, *shared[:2]), ChainScales(scales_b, *shared[2:])
        if isinstance(described, PromotedSum):
            accumulate_scaled_into(out, a, b, (left, right), described, (seed, stream, offset), chip)
            return out
        if chip == "require":
            raise RuntimeError("accumulate: chip='require': no chip is known to add like this accumulator")
        groups = -(-a.shape[-1] // described.group)
        scales = left.whole(a.shape[-2], groups), right.whole(b.shape[-1], groups)
        self._backend.accumulate_into(out, a, b, described, (seed, stream, offset), scales)
        return out


def _check_shapes(name: str, a: Tensor, b: Tensor) -> None:
    """Raise an error for operands that an operator cannot multiply."""
    if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{name}: cannot multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")


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


def _result(
    a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, shared: Sequence[int], how: str
) -> tuple[Tensor, PromotedSum | BlockScaledSum]:
    """An empty result, and the sum's description; raise an error for operands or scales that do not fit."""
    _check_shapes("accumulate_scaled", a, b)
    described = read_sum(how)
    if not isinstance(described, (PromotedSum, BlockScaledSum)):
        raise ValueError(f"accumulate_scaled: scales enter a promoted or a block-scaled sum, got {how!r}")
    sums = -(-a.shape[-1] // (described.every if isinstance(described, PromotedSum) else described.group))
    operands = (("a", scales_a, a.shape[:-1], shared[:2]), ("b", scales_b, (*b.shape[:-2], b.shape[-1]), shared[2:]))
    for name, scales, kept, (lines, each) in operands:
        shape = (*kept[:-1], -(-kept[-1] // lines), -(-sums // each))
        if scales.dtype != torch.float32 or scales.shape != shape:
            got = f"{scales.dtype} of shape {tuple(scales.shape)}".removeprefix("torch.")
            raise ValueError(f"accumulate_scaled: scales_{name} must be float32 of shape {tuple(shape)}, got {got}")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32), described


def accumulate_rows(
    x: Tensor, index: Tensor, rows: int, seed: Tensor | None, how: str, stream: int, offset: int, dtype: torch.dtype
) -> Tensor:
    """Sums of the rows of a matrix that have the same index; see `qsim_kernels.numbers.sums`.

    Args:
        x: Of shape [n, columns].
        index: The row of the result to which each row is added, of shape [n]; rows with negative ones are not added.
        rows: Rows of the result.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        how: The sum, spelled.
        stream: Which of the seed's streams of random bits to use.
        offset: Logical index of the first random number.
        dtype: The dtype to which results are rounded to nearest.
    """
    if x.dim() != 2 or index.shape != x.shape[:1]:
        raise ValueError(f"accumulate_rows: x must be a matrix with a row for each index, got {tuple(x.shape)} and {tuple(index.shape)}")
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("accumulate_rows: sums depend on how often an index occurs, which cannot be read while a CUDA graph is captured")
    out = x.new_zeros((rows, x.shape[1]), dtype=dtype)
    described = read_sum(how)
    ordered, order = index.sort(stable=True)
    order = order[ordered >= 0]
    lengths = torch.bincount(index[index >= 0], minlength=len(out))
    starts = lengths.cumsum(0) - lengths
    for length in filter(None, lengths.unique().tolist()):
        targets = (lengths == length).nonzero().view(-1)
        places = order[starts[targets, None] + torch.arange(length, device=x.device)]
        ones = x.new_ones((len(targets), 1, length))
        sums = torch.ops.qsim.accumulate.default(ones, x[places], seed, how, stream, offset, out.dtype, "never")
        out[targets] = sums.squeeze(1)
        offset += sums.numel() * noise_indices(described, length)
    return out


Implementation.register(reference="torch.sums", compiled="numba.sums", triton="triton.accumulate.launch")
define(schema_of(accumulate_rows), lambda x, index, rows, *rest: x.new_empty((rows, x.shape[1]), dtype=rest[-1]))
library.impl("accumulate_rows", accumulate_rows, "CompositeExplicitAutograd")
