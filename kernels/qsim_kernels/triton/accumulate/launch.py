"""Launches of the operator that multiplies matrices with an emulated accumulator: which kernel, compiled for what, on which planes.

Sums without a kernel use the reference: pairwise ones, those of four random numbers next to a rounded product, and random numbers that do
not begin at a multiple of eight.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.numbers.grid import Noise
from qsim_kernels.numbers.sums import (
    AlignedSum,
    BlockScaledSum,
    Order,
    PromotedSum,
    RoundedSum,
    Sum,
    TwoStepSum,
    is_stochastic,
    noise_indices,
)  # fmt: skip
from qsim_kernels.torch import sums as reference
from qsim_kernels.triton.accumulate import variants
from qsim_kernels.triton.accumulate.aligned import aligned_kernel
from qsim_kernels.triton.accumulate.chunked_sums import ChunkVariant, chunked_kernel
from qsim_kernels.triton.accumulate.exact_groups import exact_groups_kernel
from qsim_kernels.triton.accumulate.planes import Planes, PlaneScales, planes
from qsim_kernels.triton.accumulate.rounded_sums import rounded_kernel
from qsim_kernels.triton.accumulate.two_step import two_step_kernel
from qsim_kernels.triton.host.arguments import seed_of
from qsim_kernels.triton.host.capabilities import compute_capability, supports_packed_16_bit

#: Dtypes whose values a matrix unit of an H100 takes as bfloat16, or as float16.
_AS_BFLOAT16 = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_AS_FLOAT16 = (torch.float16, *_AS_BFLOAT16[1:])
_CHUNK_UNIT = (9, 0)
#: The major compute capabilities of chips whose matrix unit is tcgen05's.
_TCGEN05 = (10, 11)
#: Matrices of one launch: CUDA's limit for the last dimension of a grid.
_MOST_BATCHES = 65535
#: The longest sum that stays in float32's range where all operands' exponents are at most `planes.NARROW`.
_LONGEST = 1 << 24
#: Rows of tiles on which programs work at the same time.
_GROUP = 8


class ResultTile(NamedTuple):
    """The size of a program's tile, and its warps."""

    rows: int
    columns: int
    warps: int


class ProductLaunch(NamedTuple):
    """The matrices of one launch, three-dimensional, their scales along the sum if they have some, and the source of random bits."""

    out: Tensor
    a: Tensor
    b: Tensor
    scales: tuple[Tensor, Tensor] | None
    adder: Sum
    noise: Noise
    tile: ResultTile | None

    @property
    def length(self) -> int:
        """Products in a sum."""
        return self.a.shape[2]

    def every(self, block: int = 1) -> int:
        """The number of blocks in a short sum, or in the whole one."""
        return -(-(self.adder.every if isinstance(self.adder, PromotedSum) else self.length) // block)

    def run(self, kernel: Any, tile: ResultTile, a: Planes, b: Planes, before: tuple[Any, ...], *behind: Any, adders: list[Any]) -> None:
        """Launch a kernel on planes, once for each of some adders, of which the operands let one do the work.

        Args:
            kernel: The kernel.
            tile: The size of a program's tile.
            a: The planes of the first operand.
            b: Those of the second.
            before: The arguments before the result, which is padded as the operands' planes are.
            *behind: Those behind it.
            adders: Tuples of what the kernel is compiled for.
        """
        (batches, rows, columns), room = self.out.shape, self.out
        if (rows, columns) != (a.rows, b.rows):
            room = self.out.new_empty((batches, a.rows, b.rows))
        options = {} if INTERPRETED else {"num_warps": tile.warps}
        for variant in adders:
            kernel[-(-rows // tile.rows) * -(-columns // tile.columns), 1, batches](*before, room, *behind, *variant, tile, **options)
        if room is not self.out:
            self.out.copy_(room[:, :rows, :columns])

    def random(self) -> tuple[Any, ...]:
        """The kernels' arguments from the seed to the sizes of the result."""
        inner = noise_indices(self.adder.inner, self.adder.every) if isinstance(self.adder, PromotedSum) else 0
        (seed, stream, offset), strides = self.noise, (noise_indices(self.adder, self.length), inner)
        return *seed_of(seed, self.a), stream, offset, *strides, *self.out.shape[1:]


def accumulate_into(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    adder: Sum,
    noise: Noise,
    scales: tuple[Tensor, Tensor] | None = None,
    tile: ResultTile | None = None,
) -> None:
    """Multiply matrices `[…, M, K]` and `[…, K, N]`; see `torch.sums.accumulate_into`, which lacks the last argument.

    Args:
        out: The result, contiguous, of float32 or float64.
        a: The left matrices.
        b: The right matrices.
        adder: The sum.
        noise: The random bits.
        scales: Those of a `BlockScaledSum`, `[…, M, groups]` and `[…, N, groups]`, if its operands have some.
        tile: The size of a program's tile; by default the fastest.
    """
    if not out.numel() or not a.shape[-1]:
        out.zero_()
        return
    seed, stream, offset = noise
    if not _has_kernel(adder, offset):
        reference.accumulate_into(out, a, b, adder, noise)
        return
    rows, columns, length = a.shape[-2], b.shape[-1], a.shape[-1]
    left, right, result = a.reshape(-1, rows, length), b.reshape(-1, length, columns), out.view(-1, rows, columns)
    factors = None if scales is None else tuple(x.reshape(-1, *x.shape[-2:]) for x in scales)
    for start in range(0, len(result), _MOST_BATCHES):
        part = slice(start, start + _MOST_BATCHES)
        first = offset + start * rows * columns * noise_indices(adder, length)
        of_part = None if factors is None else (factors[0][part], factors[1][part])
        with nullcontext() if INTERPRETED else torch.cuda.device(a.device):
            _launch(ProductLaunch(result[part], left[part], right[part], of_part, adder, (seed, stream, first), tile))


def _has_kernel(adder: Sum, offset: int) -> bool:
    inner = adder.inner if isinstance(adder, PromotedSum) else adder
    if not isinstance(inner, RoundedSum):
        return True
    return inner.order != Order.PAIRWISE and (not is_stochastic(adder) or (offset % 8 == 0 and inner.roundings in (1, 2, 4)))


def _launch(product: ProductLaunch) -> None:
    inner = product.adder.inner if isinstance(product.adder, PromotedSum) else product.adder
    match inner:
        case AlignedSum():
            _launch_aligned(product, inner)
        case TwoStepSum():
            _launch_two_step(product, inner)
        case BlockScaledSum(exact=True):
            _launch_groups(product, inner)
        case BlockScaledSum():
            p, q = (None if x is None else PlaneScales(x, inner.group, inner.low_scale) for x in product.scales or (None, None))
            _launch_aligned(product, inner.aligned, p, q)
        case RoundedSum():
            held = None if inner.chunk == 1 else _unit_dtype(product.a, product.b, inner)
            if held is None:
                _launch_rounded(product, inner)
            else:
                _launch_on_unit(product._replace(a=product.a.to(held), b=product.b.to(held)), inner)


def _launch_aligned(product: ProductLaunch, adder: AlignedSum, p: PlaneScales | None = None, q: PlaneScales | None = None) -> None:
    single, promoted = variants.sums_in_single(adder) and product.length <= _LONGEST and p is None, isinstance(product.adder, PromotedSum)
    tile, dtype = product.tile or ResultTile(8, 128, 1), torch.float32 if single else torch.float64
    a, b, is_wide = _aligned_planes(product, adder, tile, dtype, p, q)
    known = [
        variants.aligned(adder, x, 2 if single else 1, promoted, supports_packed_16_bit()) for x in ((True, False) if single else (False,))
    ]
    sizes, before = (a.rows, b.rows, a.length, -(-product.length // adder.block)), (a.values, b.values, a.exponents, b.exponents)
    adders, grid = [(unit,) for unit, _ in known], known[0][1]
    product.run(aligned_kernel, tile, a, b, before, is_wide, *sizes, product.every(adder.block), *grid, adders=adders)


def _launch_two_step(product: ProductLaunch, adder: TwoStepSum) -> None:
    tile = product.tile or (ResultTile(8, 64, 1) if adder.apart else ResultTile(16, 64, 2))
    a, b, is_wide = _aligned_planes(product, adder, tile, torch.float64)
    sizes, before = (a.rows, b.rows, a.length, -(-product.length // adder.block)), (a.values, b.values, a.exponents, b.exponents)
    adders = [(variants.two_step(adder, wide),) for wide in (False, True)]
    product.run(two_step_kernel, tile, a, b, before, is_wide, *sizes, adders=adders)


def _aligned_planes(
    product: ProductLaunch,
    adder: AlignedSum | TwoStepSum,
    tile: ResultTile,
    dtype: torch.dtype,
    p: PlaneScales | None = None,
    q: PlaneScales | None = None,
) -> tuple[Planes, Planes, Tensor]:
    """Both operands as planes of values and exponents, and whether some exponent is above `NARROW`."""
    is_wide = torch.zeros(1, dtype=torch.int32, device=product.a.device)
    a = planes(product.a, dtype, tile.rows, adder.block, adder.low_a, is_wide, scales=p)
    return a, planes(product.b.mT, dtype, tile.columns, adder.block, adder.low_b, is_wide, scales=q), is_wide


def _launch_groups(product: ProductLaunch, adder: BlockScaledSum) -> None:
    tile, variant = product.tile or _tile_of_groups(product.a.device), variants.groups(adder)
    a = planes(product.a, torch.float32, tile.rows, adder.group, padded_block=variant.size)
    b = planes(product.b.mT, torch.float32, tile.columns, adder.group, padded_block=variant.size)
    groups, low = -(-product.length // adder.group), adder.low_scale
    of_a, of_b = product.scales or (None, None)
    if of_a is None or of_b is None:
        low = min(low, 0)  # the exponent of one
        one = product.a.new_ones((), dtype=torch.float32)
        of_a, of_b = (one.expand(len(x), x.shape[1], groups) for x in (product.a, product.b.mT))
    p, q = planes(of_a, torch.float32, tile.rows), planes(of_b, torch.float32, tile.columns)
    product.run(exact_groups_kernel, tile, a, b, (a.values, b.values, p.values, q.values), a.rows, b.rows, groups, low, adders=[(variant,)])


def _tile_of_groups(device: torch.device) -> ResultTile:
    """The tile of a product of groups.

    Up to version 3.7, Triton gives float64 products of 64 rows to the matrix unit of a B200, which has no float64, and fails to compile
    ("TritonGPUAccelerateMatmul"). That unit takes no tile of 32 rows.
    """
    has_tcgen05 = not INTERPRETED and compute_capability(device)[0] in _TCGEN05
    return ResultTile(32, 64, 4) if has_tcgen05 else ResultTile(64, 64, 4)


def _launch_rounded(product: ProductLaunch, adder: RoundedSum) -> None:
    """Launch the kernel of sums of products, or of chunks, which it emulates."""
    variant, grid, product_grid = variants.rounded(adder, is_stochastic(adder), isinstance(product.adder, PromotedSum))
    if adder.chunk == 1:
        tile, dtype = product.tile or (ResultTile(2, 32, 1) if variant.roundings else ResultTile(8, 128, 1)), _carrier(variant.wide)
        a, b = planes(product.a, dtype, tile.rows), planes(product.b.mT, dtype, tile.columns)
        unit, block = None, 1
    else:
        tile, block = product.tile or ResultTile(8, 64, 1), adder.chunk_sum.block
        a, b, _ = _aligned_planes(product, adder.chunk_sum, tile, torch.float64)
        unit, _ = variants.aligned(adder.chunk_sum, False, 1, False, supports_packed_16_bit())
    before, counts = (
        (a.values, b.values, a.exponents, b.exponents),
        (-(-product.length // block), adder.chunk // block, product.every(block)),
    )
    behind = (*product.random(), a.rows, b.rows, a.length, *counts, *grid, *product_grid)
    product.run(rounded_kernel, tile, a, b, before, *behind, adders=[(variant, unit)])


def _launch_on_unit(product: ProductLaunch, adder: RoundedSum) -> None:
    variant, grid, _ = variants.rounded(adder, is_stochastic(adder), isinstance(product.adder, PromotedSum))
    a, b, (batches, rows, columns) = product.a, product.b, product.out.shape
    tile = product.tile or _tile_on_unit(adder.chunk, variant.wide)
    even = rows % tile.rows == 0 and columns % tile.columns == 0 and product.length % adder.chunk == 0
    chunks = ChunkVariant(adder.chunk, min(128, adder.chunk & -adder.chunk), _GROUP, even)
    chunked_kernel[-(-rows // tile.rows) * -(-columns // tile.columns), 1, batches](
        a, b, product.out, *product.random(), product.length, product.every(), *a.stride(), *b.stride(), *grid, variant, chunks, tile,
        num_warps=tile.warps, num_stages=3,
    )  # fmt: skip


def _carrier(wide: bool) -> torch.dtype:
    return torch.float64 if wide else torch.float32


def _tile_on_unit(chunk: int, wide: bool) -> ResultTile:
    if wide:
        return ResultTile(64, 64, 4)
    return ResultTile(128, 128, 8) if chunk >= 128 else ResultTile(64, 128, 4)


def _unit_dtype(a: Tensor, b: Tensor, adder: RoundedSum) -> torch.dtype | None:
    """The dtype in which this GPU's own matrix unit computes the sums of chunks; None if it does not."""
    if INTERPRETED or compute_capability(a.device) != _CHUNK_UNIT:
        return None
    for held, taken, low in ((torch.bfloat16, _AS_BFLOAT16, -126), (torch.float16, _AS_FLOAT16, -14)):
        if adder.low_a == adder.low_b == low and a.dtype in taken and b.dtype in taken:
            return held
    return None
