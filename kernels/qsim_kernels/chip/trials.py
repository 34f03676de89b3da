"""Random operands whose products show in which order they were added, and a sample of their results.

Sums of numbers of one magnitude hardly depend on the order, and a result in 16 bits hides most of what does. So operands consist of units
of some length with magnitudes far apart, and the second half of the units are the first with the opposite sign: the exact sum is nearly
zero, and the result consists of rounding errors, which need few bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.chip.library import ChipProduct

#: Mantissa bits of operands, and the exponent field of their smallest numbers.
_FIELDS = {torch.float8_e4m3fn: (3, 1), torch.float8_e5m2: (2, 9), torch.bfloat16: (7, 121), torch.float16: (10, 9)}
#: Binades between the units of smallest and of largest numbers, and the step from one unit to the next, modulo one more.
_RANGE, _STEP = 10, 4
#: The sample has a result in each square of so many rows and columns, and many in a tile of a library's kernel.
_APART = 4


def trial_operands(
    rows: int, columns: int, length: int, product: ChipProduct, unit: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Operands of a product, `[rows, length]` and `[length, columns]`, of normal numbers between 2**-6 and 2**8.

    Args:
        rows: Rows of the result.
        columns: Columns of the result.
        length: Elements along the sum.
        product: The product, for the dtypes.
        unit: The number of elements of a unit, at most half of the length. With `None` each element has a magnitude of its own and nothing
            cancels: this shows how products are aligned that are added at once.
        device: Where they are made.

    Example:
        >>> import torch
        >>> from qsim_kernels.chip.library import ChipProduct
        >>> a, b = trial_operands(2, 3, 64, ChipProduct(torch.bfloat16, torch.bfloat16), 16, torch.device("cpu"))
        >>> torch.equal(a[:, :32], -a[:, 32:]), torch.equal(b[:32], b[32:])
        (True, True)
    """
    generator = torch.Generator(device).manual_seed(unit or 0)
    index = torch.arange(length, device=device)
    # A sum of one unit would have no second half.
    unit, half = (1, 0) if unit is None else _halved(length, unit)
    repeats = (index >= half) & (index < 2 * half)
    source = torch.where(repeats, index - half, index)
    spread = torch.randint(_RANGE + 1, (length,), device=device, generator=generator)
    binade = torch.where(index < 2 * half, _RANGE - source // unit * _STEP % (_RANGE + 1), spread if half == 0 else 0)
    a, b = (_words(count, length, dtype, generator)[:, source] for count, dtype in ((rows, product.a), (columns, product.b)))
    return _numbers(a, binade, product.a, repeats), _numbers(b, binade, product.b, repeats & False).mT


def _halved(length: int, unit: int) -> tuple[int, int]:
    """The elements of a unit, and those of the first half."""
    unit = max(min(unit, length // 2), 1)
    return unit, length // (2 * unit) * unit


def _words(rows: int, length: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw random bits."""
    whole, low, high = (torch.uint8, 0, 2**8) if dtype.itemsize == 1 else (torch.int16, -(2**15), 2**15)
    return torch.randint(low, high, (rows, length), dtype=whole, device=generator.device, generator=generator)


def _numbers(words: Tensor, binade: Tensor, dtype: torch.dtype, negated: Tensor) -> Tensor:
    """Numbers with the signs, mantissas and last two bits of the exponents of random words."""
    mantissa, field = _FIELDS[dtype]
    top = 0x80 if dtype.itemsize == 1 else -(2**15)
    signs = (words & top) ^ torch.where(negated, top, 0).to(words.dtype)
    return (signs | (words & ((4 << mantissa) - 1)) + ((binade + field) << mantissa).to(words.dtype)).view(dtype)


def spread_indices(count: int, device: torch.device) -> Tensor:
    """An index in each part of a dimension, at varying positions.

    Example:
        >>> spread_indices(17, torch.device("cpu"))
        tensor([ 0,  5, 10, 15, 16])
    """
    parts = torch.arange(-(-count // _APART), device=device)
    return (parts * _APART + parts % _APART).clamp(max=count - 1)
