"""Inputs of circuits that have several: operands of sums, and counters and keys of Philox."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.golden import results

#: The most vectors whose operands are all special.
_MOST_SPECIAL = 2048


def drawn(circuit: Dot | Philox, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of inputs, and of random integers.

    Args:
        circuit: The circuit.
        count: How many inputs are random.
        generator: Where they are drawn from.
    """
    if isinstance(circuit, Philox):
        return _words(count, generator), torch.zeros(count + 14, 0, dtype=torch.int64)
    x = _operands(circuit, -(-count // (2 * circuit.length)), generator)
    random = torch.randint(0, 1 << circuit.random_bits, (len(x), circuit.draws), generator=generator)
    # A quarter of the random integers are the smallest or the largest.
    last, chosen = (1 << circuit.random_bits) - 1, torch.randint(0, 8, random.shape, generator=generator)
    return x, torch.where(chosen == 0, 0, torch.where(chosen == 1, last, random))


def _words(count: int, generator: torch.Generator) -> Tensor:
    """Zeros, ones, single bits, and random words."""
    ones = (1 << 32) - 1
    ends = torch.tensor([[0] * 6, [ones] * 6])
    single = torch.eye(6, dtype=torch.int64)
    return torch.cat([ends, single, single * ones, torch.randint(0, 1 << 32, (count, 6), generator=generator)])


def _operands(circuit: Dot, count: int, generator: torch.Generator) -> Tensor:
    kinds = [*[circuit.a] * circuit.length, *[circuit.b] * circuit.length, circuit.total]
    a, b, c = (_special(fmt) for fmt in (circuit.a, circuit.b, circuit.total))
    triples = torch.tensor(list(itertools.product(a, b, c)))
    triples = triples[torch.randperm(len(triples), generator=generator)[: _MOST_SPECIAL // circuit.length]]
    special = torch.stack([_chosen(_special(fmt), len(triples), generator) for fmt in kinds], 1)
    # The first product and the running sum take all special values together, the other products any.
    special[:, 0], special[:, circuit.length], special[:, -1] = triples.T
    others = torch.stack([torch.randint(0, 1 << fmt.bits, (count,), generator=generator) for fmt in kinds], 1)
    near = torch.stack([_near_one(fmt, count, generator) for fmt in kinds], 1)
    mixed = torch.where(torch.randint(0, 4, (count, 1), generator=generator) == 0, others, near)
    return torch.cat([special, mixed, _cancelling(circuit, near.clone(), generator)])


def _chosen(codes: list[int], count: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(codes)[torch.randint(0, len(codes), (count,), generator=generator)]


def _special(fmt: Format) -> list[int]:
    """Codes of zeros, ones, the ends of the range and of subnormal values, infinities and NaN."""
    magnitudes = 1 << fmt.bits - 1
    normal = 1 << fmt.grid.mantissa if fmt.grid.mantissa < fmt.bits - 1 else 1
    codes = {0, 1, 2, normal - 1, normal, normal + 1, magnitudes // 2, magnitudes // 2 - normal, *(magnitudes - k for k in range(1, 4))}
    codes |= {magnitudes - normal + k for k in (-1, 0, 1)}
    return sorted({code & ((1 << fmt.bits) - 1) | sign for code in codes if code >= 0 for sign in (0, magnitudes)})


def _near_one(fmt: Format, count: int, generator: torch.Generator) -> Tensor:
    """Codes in the middle of a format's range, whose exponents are near each other; any where formats have few."""
    codes = torch.randint(0, 1 << fmt.bits, (count,), generator=generator)
    middle, spread = (1 << fmt.bits) // 4, min(8 << fmt.grid.mantissa, (1 << fmt.bits) // 4)
    sign = codes & 1 << fmt.bits - 1
    near = (middle + codes % (2 * spread) - spread).clamp(0, (1 << fmt.bits - 1) - 1)
    return near | sign


def _cancelling(circuit: Dot, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Rows whose running sum is nearly the negative of their products."""
    rows[:, -1] = 0
    sums = results(circuit, rows, torch.zeros(len(rows), circuit.draws, dtype=torch.int64))
    opposite = sums ^ 1 << circuit.total.bits - 1
    away = torch.randint(-3, 4, sums.shape, generator=generator)
    rows[:, -1] = (opposite + away).clamp(0, (1 << circuit.total.bits) - 1)
    return rows
