"""The operators in plain torch: the default on every device without its own kernels, and the reference for the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qsim_kernels.meanings import torch as meaning
from qsim_kernels.numbers.carrier import DOUBLE, GridBits, counts_wide, grid_bits, rounding_bits
from qsim_kernels.numbers.encoding import Encoding, code_dtype, coding_bits, largest_code, read_encoding
from qsim_kernels.numbers.grid import Coding, Grid, GridRounding, Noise, Rule
from qsim_kernels.torch.chunks import pieces
from qsim_kernels.torch.philox import ElementNoise, Key, key_of, random_bits
from qsim_kernels.torch.reductions import checksum, tally
from qsim_kernels.torch.rounding import as_values, float_dtype, rounded
from qsim_kernels.torch.tables import code_table
from qsim_kernels.torch.updates import update

__all__ = [
    "ElementNoise",
    "checksum",
    "decode_into",
    "encode_both_ways",
    "encode_into",
    "quantize_and_encode_into",
    "quantize_and_sum_into",
    "quantize_into",
    "random_bits",
    "tally",
    "update",
]


def quantize_into(out: Tensor, x: Tensor, rounding: GridRounding, noise: Noise) -> None:
    """Round `x` onto a grid, into `out`, which may be `x` itself.

    Args:
        out: Of `x`'s shape, in a dtype that holds the grid.
        x: Values.
        rounding: How to round.
        noise: The random bits.
    """
    bits, (seed, stream, offset) = rounding_bits(*rounding, wide=torch.float64 in (x.dtype, out.dtype)), noise
    key = None if seed is None else key_of(seed, x)
    for index, (source, target) in pieces(x, out, first=offset):
        patterns = _rounded(source, bits, rounding.rule, key, stream, index)
        target.copy_(as_values(patterns, bits, out.dtype).view(source.shape))


def encode_into(out: Tensor, x: Tensor, encoding: Encoding, noise: Noise, check: bool = True) -> bool:
    """Round `x` onto a grid and write the codes into `out`; see `quantize_into`.

    Args:
        out: Tensor for the codes.
        x: Values.
        encoding: How to round, and the codes. A NaN that has none gets that of the largest value.
        noise: The random bits.
        check: Whether to look for such NaN.

    Returns:
        Whether there is one, if `check` is set.
    """
    (grid, rule, coding), (seed, stream, offset) = encoding, noise
    bits = rounding_bits(grid, rule, wide=x.dtype == torch.float64 or counts_wide(grid, coding))
    key = None if seed is None else key_of(seed, x)
    bits, code_of = _coder(grid, coding, bits)
    lost = False
    for index, (source, target) in pieces(x, out, first=offset):
        patterns = _rounded(source, bits, rule, key, stream, index)
        if check and coding.nan < 0:
            lost = lost or bool((patterns == bits.carrier.nan).any())
        # Wrapping to the code's own width keeps its bits.
        target.copy_(code_of(patterns).view(source.shape))
    return lost


def quantize_and_encode_into(
    out: Tensor,
    codes: Tensor,
    x: Tensor,
    rounding: GridRounding,
    noise: Noise,
    encoding: Encoding,
    code_noise: Noise,
    quantize: Callable[..., None] = quantize_into,
    encode: Callable[..., bool] = encode_into,
) -> None:
    """Round `x` onto two grids: to values, as `quantize` does, and to codes, as `encode` does without a check."""
    quantize(out, x, rounding, noise)
    encode(codes, x, encoding, code_noise, check=False)


#: How codes are made, spelled; their stream of random bits; and their dtype, which may be a float's of their width.
WantedCodes = tuple[str, int, torch.dtype]


def encode_both_ways(
    x: Tensor, seed: Tensor | None, codes: WantedCodes | None, turned: WantedCodes, encode: Callable[..., bool] = encode_into
) -> tuple[Tensor | None, Tensor]:
    """Round a matrix to codes in place, if they are wanted, and to transposed ones, whose random bits are those of its own elements.

    A product on a chip reads FP8 operands along the sum. The three products of a layer sum along different dimensions, so that each of its
    matrices is needed both ways, as rounded forward and as rounded backward.

    Args:
        x: A matrix.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        codes: The codes in place.
        turned: The transposed codes.
        encode: The function that rounds, as `encode_into` does.
    """

    def encoded(rounding: str, stream: int, dtype: torch.dtype) -> Tensor:
        encoding = read_encoding(rounding)
        if encoding.is_stochastic and seed is None:
            raise ValueError("stochastic rounding needs a seed")
        out = torch.empty(x.shape, dtype=code_dtype(encoding.coding.bits), device=x.device)
        encode(out, x.contiguous(), encoding, (seed, stream, 0), check=False)
        return out.view(dtype)

    return None if codes is None else encoded(*codes), encoded(*turned).t().contiguous()


def quantize_and_sum_into(
    out: Tensor, x: Tensor, rounding: GridRounding, noise: Noise, quantize: Callable[..., None] = quantize_into
) -> Tensor:
    """Round a matrix onto a grid, as `quantize` does, and sum its unrounded rows.

    Returns:
        The sums, in float32, or in float64 for float64 input.
    """
    quantize(out, x, rounding, noise)
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def decode_into(out: Tensor, codes: Tensor, grid: Grid, coding: Coding) -> None:
    """Write the values of `codes` into `out`."""
    bits = grid_bits(grid, wide=out.dtype == torch.float64 or counts_wide(grid, coding))
    value_of = _reader(grid, coding, bits, out.device)
    mask, width = (1 << coding.bits) - 1 if coding.bits < 64 else -1, torch.int64 if bits.carrier == DOUBLE else torch.int32
    for _, (source, target) in pieces(codes, out):
        target.copy_(as_values(value_of((source.to(torch.int64) & mask).to(width)), bits, out.dtype))


def _coder(grid: Grid, coding: Coding, bits: GridBits) -> tuple[GridBits, Callable[[Tensor], Tensor]]:
    """The grid for a rounding to codes, and a function that makes codes of its results: rounding onto a table finds them itself."""
    if grid.table:
        nan = coding.nan if coding.nan >= 0 else largest_code(grid, coding)
        return bits._replace(writes_codes=True), lambda codes: codes.masked_fill(codes == bits.carrier.nan, nan)
    code_of, (numbers, variant) = meaning.codes(bits.carrier).code_of, coding_bits(grid, coding, bits)
    return bits, lambda patterns: code_of(patterns, numbers, variant)


def _reader(grid: Grid, coding: Coding, bits: GridBits, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that gives the bits of the values of codes."""
    if grid.table:
        table = code_table(grid.table, coding.bits, bits.carrier, device)
        return lambda codes: table[codes].to(codes.dtype)
    value_of, (numbers, variant) = meaning.codes(bits.carrier).value_of, coding_bits(grid, coding, bits)
    return lambda codes: value_of(codes, numbers, variant)


def _rounded(source: Tensor, bits: GridBits, rule: Rule, key: Key | None, stream: int, index: int) -> Tensor:
    """Round one piece's values, as a flat tensor of the carrier's bit patterns."""
    values = source.reshape(-1).to(float_dtype(bits))
    noise = None if key is None else ElementNoise(key, stream, index, values.numel(), values.device)
    return rounded(values.view(torch.int64 if values.dtype == torch.float64 else torch.int32), bits, rule, noise)
