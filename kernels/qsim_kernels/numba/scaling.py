"""Rounding under scales and Hadamard transforms on CPUs, in loops compiled by Numba; the same bits as in `qsim_kernels.torch`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numba import quantize_into
from qsim_kernels.numba.arguments import held, loop_noise, readable, strip, writable
from qsim_kernels.numba.jobs import LANES, ScalesJob, TilesJob, Transform, job_address, packed
from qsim_kernels.numba.native import Native
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import SINGLE, grid_bits, rounding_bits
from qsim_kernels.numbers.grid import Noise
from qsim_kernels.numbers.scales import ElementRounding, Restore, ScaledRounding, ScaleRule, Scales, TileSizes, Turn, scale_numbers
from qsim_kernels.torch import hadamard as hadamard_in_torch, runs, scaling as reference
from qsim_kernels.torch.rounding import one_nan
from qsim_kernels.torch.scaling import NO_NOISE, under_whole

_AMAXES, _ROWS, _TILES = (Native("tiles", name, 5) for name in ("find_amaxes", "quantize_rows", "quantize_tiles"))
_SHARE = Loop("tiles", "share")
_SCALES: dict[int, Loop] = {rule: Loop("scales", rule.name.lower()) for rule in ScaleRule}
_TRANSFORM = Loop("hadamard", "transform")
_CPU = torch.device("cpu")
#: Elements of the parts into which a tensor that is one tile is cut.
_PART = 1 << 16
_quantize_scaled = partial(reference.quantize_scaled_into, quantize=quantize_into)


def amaxes_into(out: Tensor, x: Tensor, tiles: TileSizes, turn: Turn | None, finite: bool) -> None:
    """Write the largest magnitude of each tile; see `reference.scaling.amaxes_into`."""
    if not out.numel():
        return
    if x.dtype == torch.float64 or not x.numel():
        reference.amaxes_into(out, x, tiles, turn, finite)
        return
    x = readable(x if turn is None else hadamard(x, turn))
    if out.numel() == 1 and x.numel() > _PART:
        # The magnitudes of parts first, so that threads can share them.
        parts = torch.empty(-(-x.numel() // _PART), dtype=torch.float32, device=out.device)
        amaxes_into(parts, x, TileSizes(1, x.numel(), 1, _PART, False), None, finite)
        x, tiles = parts, TileSizes(1, parts.numel(), 1, parts.numel(), False)
    job = _job(x, tiles)._replace(scales=out.data_ptr(), finite=SINGLE.infinity - 1 if finite else SINGLE.nan)
    _share(_AMAXES, job, _tile_rows(job))


def scales_into(
    out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales, noise: Noise = NO_NOISE, tiles: TileSizes | None = None
) -> None:
    """Write the scales that result from the largest magnitudes; see `reference.scaling.scales_into`."""
    if scales.draws or amaxes.dtype == torch.float64 or (under is not None and under.numel() > 1):
        reference.scales_into(out, amaxes, under, scales, noise, tiles)
        return
    amaxes = amaxes.contiguous()
    job = _scales_job(scales, out, amaxes, 1.0 if under is None else under.item())
    _SCALES[scales.rule].share(job, amaxes.numel())


scales_of_tiles_into = partial(reference.scales_of_tiles_into, largest=amaxes_into, make=scales_into)


def quantize_tiles_into(
    out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, rounding: ScaledRounding
) -> None:
    """Round `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    tiles = rounding.tiles
    x = x if rounding.turn is None else hadamard(x, rounding.turn)
    if scales is None:
        scales = torch.empty(tiles.counts(x.numel()), dtype=torch.float32, device=x.device)
    is_in_loops = _in_loops(x, out, rounding.elements) and not making.draws
    if not is_in_loops or not x.numel() or tiles.across or (under is not None and under.numel() > 1):
        scales_of_tiles_into(scales, x, under, tiles, None, False, making, rounding.noise)
        quantize_scaled_into(out, x, scales, under, rounding._replace(turn=None))
        return
    x, divisors = readable(x), scales if under is None else torch.empty_like(scales)
    whole, result = 1.0 if under is None else under.item(), writable(out)
    scales_job = _scales_job(making, scales, scales, whole)
    job = _job(x, tiles)._replace(
        **_rounding(result, scales, divisors, rounding, out.dtype),
        scales=scales.data_ptr(),
        finite=SINGLE.nan,
        whole=SINGLE.pattern(whole),
        amaxes_loop=_AMAXES.address,
        scales_loop=_SCALES[making.rule].address,
        scales_job=job_address(scales_job),
        rows_loop=_ROWS.address,
    )
    _share(_TILES, job, _tile_rows(job))
    if result is not out:
        out.copy_(one_nan(result.to(out.dtype)))


def quantize_scaled_into(out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, rounding: ScaledRounding) -> None:
    """Round `x` divided by its scales onto a grid; see `reference.scaling.quantize_scaled_into`."""
    if not _in_loops(x, out, rounding.elements):
        _quantize_scaled(out, x, scales, under, rounding)
        return
    if not x.numel():
        return
    x, scales = readable(x if rounding.turn is None else hadamard(x, rounding.turn)), scales.to(torch.float32).contiguous()
    divisors, result = scales if under is None else under_whole(scales, under), writable(out)
    job = _job(x, rounding.tiles)._replace(**_rounding(result, scales, divisors, rounding, out.dtype))
    _share(_ROWS, job, job.matrices * job.tiles.rows)
    if result is not out:
        out.copy_(one_nan(result.to(out.dtype)))


def _in_loops(x: Tensor, out: Tensor, elements: ElementRounding) -> bool:
    """Whether the loops can round: in float32's bits."""
    return torch.float64 not in (x.dtype, out.dtype) and rounding_bits(elements.grid, elements.rule, wide=False).carrier == SINGLE


def _job(x: Tensor, tiles: TileSizes) -> TilesJob:
    """The values and their tiles, as a single row if all tiles follow each other: threads can then share any number of them."""
    if tiles.height == 1 and tiles.columns % tiles.width == 0 and not tiles.across:
        tiles = tiles._replace(rows=1, columns=x.numel())
    size = tiles.rows * tiles.columns
    return TilesJob(held(x), x.numel() // size if size else 0, tiles)


def _rounding(out: Tensor, scales: Tensor, divisors: Tensor, rounding: ScaledRounding, dtype: torch.dtype) -> dict[str, Any]:
    """A job's rounding of elements under scales; results must be finite in `dtype`."""
    grid, rule, restore = rounding.elements
    return {
        "out": held(out),
        "factors": {Restore.NOTHING: 0, Restore.SCALE: scales.data_ptr(), Restore.ALL: divisors.data_ptr()}[restore],
        "divisors": divisors.data_ptr(),
        "strip": strip(grid_bits(grid, wide=False), rule),
        "noise": loop_noise(rounding.noise),
        "limit": SINGLE.pattern(torch.finfo(dtype).max) if restore and rule.saturates else SINGLE.nan,
        "leaves_zero": rule.leaves_zero,
    }


def _tile_rows(job: TilesJob) -> int:
    """The number of rows of tiles in a job."""
    return (1 if job.tiles.across else job.matrices) * -(-job.tiles.rows // job.tiles.height)


def _share(loop: Native, job: TilesJob, rows: int) -> None:
    """Run a loop of `loops.tiles` over a number of rows, or of rows of tiles; threads share those, or the tiles of a single row."""
    job, tiles = job._replace(loop=loop.address, by_tiles=rows == 1), job.tiles
    if rows == 1:
        tile = tiles.width * (job.matrices if tiles.across else 1) * tiles.height
        _SHARE.share(packed(job), -(-tiles.columns // tiles.width), tile)
    else:
        _SHARE.share(packed(job), rows, job.matrices * tiles.rows * tiles.columns // rows)


def _scales_job(making: Scales, out: Tensor, amaxes: Tensor, whole: float) -> bytes:
    """The job of a loop of `loops.scales`."""
    return packed(ScalesJob(out.data_ptr(), amaxes.data_ptr(), whole, scale_numbers(making)))


def hadamard(x: Tensor, turn: Turn) -> Tensor:
    """Transform a tensor, in float32, or in float64 for float64 input; see `torch.hadamard`."""
    if x.dtype == torch.float64 or not x.numel():
        return hadamard_in_torch.hadamard(x, turn)
    out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    largest = SINGLE.infinity - 1 if x.dtype == torch.float16 else SINGLE.pattern(torch.finfo(torch.float32).max / turn.size)
    signs, norms = _factors(turn.size, turn.signs)
    # Threads share whole blocks where they can, because there may be only one matrix.
    whole = turn.length % turn.size == 0
    length = turn.size if whole else turn.length
    count, threads = out.numel() // (length * turn.inner), torch.get_num_threads()
    part = -(-count // threads)
    lanes = torch.empty(threads * turn.size * LANES, dtype=torch.int32, device=_CPU)
    matrices = out.data_ptr(), length, turn.inner, whole and turn.inner == 1
    job = Transform(*matrices, signs.data_ptr(), norms.data_ptr(), norms.numel(), largest, lanes.data_ptr(), part)
    _TRANSFORM.share(packed(job), count, length * turn.inner, part)
    return out


rescaled_into, matmul_rescaled_into = reference.rescaled_into, reference.matmul_rescaled_into
quantize_both_ways_into = partial(reference.quantize_both_ways_into, quantize_tiles=quantize_tiles_into)
quantize_tiles_and_amaxes_into = partial(reference.quantize_tiles_and_amaxes_into, quantize_tiles=quantize_tiles_into, largest=amaxes_into)
quantize_best_into = partial(reference.quantize_best_into, quantize=quantize_into, transform=hadamard)
quantize_eden_into = partial(reference.quantize_eden_into, quantize=quantize_into, transform=hadamard)
quantize_nested_into = partial(reference.quantize_nested_into, quantize=quantize_tiles_into, transform=hadamard)
hadamard_of_runs = partial(runs.hadamard_of_runs, transform=hadamard)
amaxes_of_runs_into = partial(runs.amaxes_of_runs_into, transform=hadamard, largest=amaxes_into)
quantize_runs_into = partial(runs.quantize_runs_into, transform=hadamard, quantize_tiles=quantize_tiles_into)


@lru_cache(maxsize=64)
def _factors(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sign bits that a block's elements are flipped by, and the last factor of blocks of every power of two up to the size."""
    signs = [SINGLE.sign if sign < 0 else 0 for sign in hadamard_in_torch.signs_of(Turn(size, 0, 0, seed))]
    norms = [(1 << power) ** -0.5 for power in range(size.bit_length())]
    return torch.tensor(signs, dtype=torch.int32, device=_CPU), torch.tensor(norms, dtype=torch.float32, device=_CPU)
