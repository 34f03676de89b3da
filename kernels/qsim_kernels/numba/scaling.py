"""Rounding under scales on CPUs, in loops compiled by Numba; bit for bit the same as `qsim_kernels.torch.scaling`."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from qsim_kernels.numba import quantize_into, rounding
from qsim_kernels.numba.hadamard import hadamard
from qsim_kernels.numba.jobs import Job, job_address, packed
from qsim_kernels.numba.native import Native
from qsim_kernels.numba.rounding import strip
from qsim_kernels.numba.threads import Loop
from qsim_kernels.numbers.carrier import SINGLE, double_bits, grid_bits, rounding_bits
from qsim_kernels.numbers.grid import Mode, Overflow, Rule
from qsim_kernels.numbers.scales import ElementRounding, Noise, Restore, ScaledRounding, ScaleRule, Scales, TileSizes, Turn
from qsim_kernels.torch import scaling as reference
from qsim_kernels.torch.rounding import one_nan
from qsim_kernels.torch.scaling import matmul_rescaled_into, rescaled_into, under_whole

__all__ = [
    "amaxes_into",
    "hadamard",
    "matmul_rescaled_into",
    "quantize_scaled_into",
    "quantize_tiles_into",
    "rescaled_into",
    "scales_into",
    "scales_of_tiles_into",
]

_STORED = (torch.float32, torch.bfloat16)
_AMAXES, _ROWS, _TILES = (Native("tiles", name, 5) for name in ("find_amaxes", "quantize_rows", "quantize_tiles"))
_SHARE, _SCALES = Loop("tiles", "share"), Loop("scales", "scales")
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
    x = _stored(x if turn is None else hadamard(x, turn))
    if out.numel() == 1 and x.numel() > _PART:
        # The magnitudes of parts first, so that threads can share them.
        parts = torch.empty(-(-x.numel() // _PART), dtype=torch.float32, device=out.device)
        amaxes_into(parts, x, TileSizes(1, x.numel(), 1, _PART, False), None, finite)
        x, tiles = parts, TileSizes(1, parts.numel(), 1, parts.numel(), False)
    job = _job(x, tiles)._replace(scales=out.data_ptr(), counted=SINGLE.infinity - 1 if finite else SINGLE.nan)
    _share(_AMAXES, job, _tile_rows(job))


def scales_into(out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales) -> None:
    """Write the scales that result from the largest magnitudes; see `reference.scaling.scales_into`."""
    if amaxes.dtype == torch.float64 or (under is not None and under.numel() > 1):
        reference.scales_into(out, amaxes, under, scales)
        return
    amaxes = amaxes.contiguous()
    _SCALES.share(_making(scales, out.data_ptr(), amaxes.data_ptr(), 1.0 if under is None else under.item()), amaxes.numel())


scales_of_tiles_into = partial(reference.scales_of_tiles_into, largest=amaxes_into, make=scales_into)


def quantize_tiles_into(out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, how: ScaledRounding) -> None:
    """Round `x` under the scales of its tiles; see `reference.scaling.quantize_tiles_into`."""
    tiles, turn, elements, noise = how
    x = x if turn is None else hadamard(x, turn)
    if scales is None:
        scales = torch.empty(tiles.counts(x.numel()), dtype=torch.float32, device=x.device)
    if not _in_loops(x, out, elements) or not x.numel() or tiles.across or (under is not None and under.numel() > 1):
        scales_of_tiles_into(scales, x, under, tiles, None, False, making)
        quantize_scaled_into(out, x, scales, under, how._replace(turn=None))
        return
    x, divisors = _stored(x), scales if under is None else torch.empty_like(scales)
    whole = 1.0 if under is None else under.item()
    made = _making(making, scales.data_ptr(), scales.data_ptr(), whole)
    factors = {Restore.NOTHING: None, Restore.SCALE: scales, Restore.ALL: divisors}[elements.restore]
    result = _result(out)
    job = _rounding(_job(x, tiles), result, factors, divisors, elements, out.dtype)._replace(**_noise(noise))
    job = job._replace(scales=scales.data_ptr(), making=job_address(made), under=SINGLE.pattern(whole), counted=SINGLE.nan)
    job = job._replace(finding=_AMAXES.address, scaling=_SCALES.address, rounding=_ROWS.address)
    _share(_TILES, job, _tile_rows(job))
    if result is not out:
        out.copy_(one_nan(result.to(out.dtype)))


def quantize_scaled_into(out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, how: ScaledRounding) -> None:
    """Round `x` divided by its scales onto a grid; see `reference.scaling.quantize_scaled_into`."""
    tiles, turn, elements, noise = how
    if not _in_loops(x, out, elements):
        _quantize_scaled(out, x, scales, under, how)
        return
    if not x.numel():
        return
    x, scales = _stored(x if turn is None else hadamard(x, turn)), scales.to(torch.float32).contiguous()
    divisors = scales if under is None else under_whole(scales, under)
    factors = {Restore.NOTHING: None, Restore.SCALE: scales, Restore.ALL: divisors}[elements.restore]
    result = _result(out)
    job = _rounding(_job(x, tiles), result, factors, divisors, elements, out.dtype)._replace(**_noise(noise))
    _share(_ROWS, job, job.matrices * job.rows)
    if result is not out:
        out.copy_(one_nan(result.to(out.dtype)))


def _in_loops(x: Tensor, out: Tensor, elements: ElementRounding) -> bool:
    """Whether the loops can round: in float32's bits."""
    return torch.float64 not in (x.dtype, out.dtype) and rounding_bits(elements.grid, elements.rule, wide=False).carrier == SINGLE


def _stored(x: Tensor) -> Tensor:
    """Values in the form that loops read."""
    return (x if x.dtype in _STORED else x.to(torch.float32)).contiguous()


def _result(out: Tensor) -> Tensor:
    """The tensor that loops write, the output itself if they can."""
    return out if out.dtype in _STORED and out.is_contiguous() else torch.empty(out.shape, dtype=torch.float32, device=out.device)


def _job(x: Tensor, tiles: TileSizes) -> Job:
    """The values and their tiles, as a single row if all tiles follow each other: threads can then share any number of them."""
    rows, columns, height, width, across = tiles
    if height == 1 and columns % width == 0 and not across:
        rows, columns = 1, x.numel()
    matrices = x.numel() // (rows * columns) if rows * columns else 0
    return Job(
        x=x.data_ptr(),
        x_is_narrow=x.element_size() == 2,
        matrices=matrices,
        rows=rows,
        columns=columns,
        height=height,
        width=width,
        across=across,
    )


def _rounding(job: Job, out: Tensor, factors: Tensor | None, divisors: Tensor, elements: ElementRounding, dtype: torch.dtype) -> Job:
    """Add how elements are rounded to a job; results must be finite in `dtype`."""
    chosen = strip(grid_bits(elements.grid, wide=False), elements.rule)
    is_limited = elements.restore and elements.rule.saturates
    return job._replace(
        out=out.data_ptr(),
        out_is_narrow=out.element_size() == 2,
        factors=0 if factors is None else factors.data_ptr(),
        divisors=divisors.data_ptr(),
        strip=chosen.loop,
        how=chosen.grid,
        leaves_zero=elements.rule.leaves_zero,
        most=SINGLE.pattern(torch.finfo(dtype).max) if is_limited else SINGLE.nan,
    )


def _noise(noise: Noise) -> dict[str, int]:
    """A job's random bits."""
    seed, stream, offset = noise
    return {"seed": 0 if seed is None else int(seed), "stream": stream, "offset": offset}


def _tile_rows(job: Job) -> int:
    """The number of rows of tiles in a job."""
    return (1 if job.across else job.matrices) * -(-job.rows // job.height)


def _share(loop: Native, job: Job, rows: int) -> None:
    """Run a loop of `loops.tiles` over a number of rows, or of rows of tiles; threads share those, or the tiles of a single row."""
    job = job._replace(loop=loop.address, by_tiles=rows == 1)
    if rows == 1:
        tile = job.width * (job.matrices if job.across else 1) * job.height
        _SHARE.share(packed(job), -(-job.columns // job.width), tile)
    else:
        _SHARE.share(packed(job), rows, job.matrices * job.rows * job.columns // rows)


def _making(how: Scales, out: int, amaxes: int, under: float) -> bytes:
    """The job of `loops.scales`: the addresses of the scales and of the largest magnitudes, and the scale of the whole tensor, or 1."""
    return packed((out, amaxes, double_bits(under), *_scale_numbers(how)))


@lru_cache(maxsize=256)
def _scale_numbers(how: Scales) -> tuple[int, ...]:
    values, mode = grid_bits(how.grid, wide=True), Mode.UP if how.rule == ScaleRule.CEIL else Mode.NEAREST
    # Without zero, every number is above half of the smallest.
    values = values if values.zero else values._replace(half=-1)
    grid = rounding.numbers(values, Rule(int(mode), 0, False, int(Overflow.SATURATE)))
    margin, largest, least = double_bits(math.ldexp(1.0, how.margin)), double_bits(how.largest), double_bits(how.least)
    return how.rule, margin, largest, how.mantissa, least, *grid
