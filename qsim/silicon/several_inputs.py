"""Inputs of circuits that have several: operands of sums, blocks and their scales, and counters and keys of Philox."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from qsim.formats import FP32, Float, Format
from qsim.functional import encode
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.golden import results, values_of
from qsim.silicon.inputs import corners, weighted

_MAGNITUDE, _INFINITY = (1 << 31) - 1, 0x7F800000
#: The most vectors whose operands are all special.
_MOST_SPECIAL = 2048


def drawn(circuit: BlockCircuit | Dot | Philox, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of inputs, and of random integers.

    Args:
        circuit: The circuit.
        count: How many inputs are random.
        generator: Where they are drawn from.
    """
    if isinstance(circuit, Philox):
        return _words(count, generator), torch.zeros(count + 14, 0, dtype=torch.int64)
    if isinstance(circuit, Dot):
        x, draws = _operands(circuit, -(-count // (2 * circuit.length)), generator), circuit.draws
        x = x.repeat(4, 1) if draws else x
    else:
        x, draws = (_blocks if circuit.operation == "scale" else _elements)(circuit, count, generator), int(circuit.random_bits > 0)
    random = torch.randint(0, 1 << circuit.random_bits, (len(x), draws), generator=generator)
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
    kinds = [*(fmt for fmt, size in circuit.factors.values() for _ in range(size)), circuit.total]

    def rows(draw: Callable[[Format], Tensor]) -> Tensor:
        return torch.stack([draw(fmt) for fmt in kinds], 1)

    a, b, c = (_special(fmt) for fmt in (circuit.a, circuit.b, circuit.total))
    triples = torch.tensor(list(itertools.product(a, b, c)))
    triples = triples[torch.randperm(len(triples), generator=generator)[: _MOST_SPECIAL // circuit.length]]
    special = rows(lambda fmt: _chosen(_special(fmt), len(triples), generator))
    finite = rows(lambda fmt: _near_one(fmt, len(triples), generator))
    # The first product and the running sum take all special values together. Of the other factors of a long sum few are special: NaN in
    # any of them would hide the rest.
    special = torch.where(torch.randint(0, circuit.length, special.shape, generator=generator) == 0, special, finite)
    special[:, 0], special[:, circuit.length], special[:, -1] = triples.T
    others = rows(lambda fmt: torch.randint(0, 1 << fmt.bits, (count,), generator=generator))
    near = rows(lambda fmt: _near_one(fmt, count, generator))
    mixed = torch.where(torch.randint(0, 4, (count, 1), generator=generator) == 0, others, near)
    return torch.cat([special, mixed, _cancelling(circuit, near.clone(), generator)])


def _chosen(codes: list[int], count: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(codes)[torch.randint(0, len(codes), (count,), generator=generator)]


def _special(fmt: Format) -> list[int]:
    """Codes of zeros, ones, the ends of the range and of subnormal values, infinities and NaN."""
    magnitudes = 1 << fmt.bits - fmt.is_signed
    normal = 1 << fmt.grid.mantissa if fmt.grid.mantissa < fmt.bits - 1 else 1
    codes = {0, 1, 2, normal - 1, normal, normal + 1, magnitudes // 2, magnitudes // 2 - normal, *(magnitudes - k for k in range(1, 4))}
    codes |= {magnitudes - normal + k for k in (-1, 0, 1)}
    return sorted({(code | sign) & ((1 << fmt.bits) - 1) for code in codes if code >= 0 for sign in (0, magnitudes)})


def _near_one(fmt: Format, count: int, generator: torch.Generator) -> Tensor:
    """Codes in the middle of a format's range, whose exponents are near each other; any finite ones where formats have few."""
    codes = torch.randint(0, 1 << fmt.bits, (count,), generator=generator)
    magnitudes = 1 << fmt.bits - fmt.is_signed
    middle, spread = magnitudes // 2, max(min(8 << fmt.grid.mantissa, magnitudes // 2), 1)
    near = (middle + codes % (2 * spread) - spread).clamp(0, magnitudes - 1)
    near = torch.where(values_of(near, fmt).isfinite(), near, middle)
    return near | codes & ((1 << fmt.bits) - magnitudes)


def _cancelling(circuit: Dot, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Rows whose running sum is nearly the negative of their products."""
    rows[:, -1] = 0
    sums = results(circuit, rows, torch.zeros(len(rows), circuit.draws, dtype=torch.int64))
    opposite = sums ^ 1 << circuit.total.bits - 1
    away = torch.randint(-3, 4, sums.shape, generator=generator)
    rows[:, -1] = (opposite + away).clamp(0, (1 << circuit.total.bits) - 1)
    return rows


def _blocks(circuit: BlockCircuit, count: int, generator: torch.Generator) -> Tensor:
    """Blocks whose largest magnitudes are those at which scales change and their neighbours, or any, and special ones."""
    size, block = circuit.format.size, circuit.format
    whole = _wholes(count, generator)
    values = values_of(corners(block.scale), FP32).abs() * block.element.max * (whole[0] if circuit.has_whole else 1.0)
    largest = _words_of(values)[torch.randint(0, len(values), (count,), generator=generator)]
    largest = (largest + torch.randint(-2, 3, (count,), generator=generator)).clamp(0, _INFINITY - 1)
    largest = torch.where(torch.randint(0, 3, (count,), generator=generator) == 0, weighted(count, generator) & _MAGNITUDE, largest)
    subnormal = torch.randint(0, 1 << 23, (count,), generator=generator)
    largest = _narrowed(torch.where(torch.randint(0, 8, (count,), generator=generator) == 0, subnormal, largest), circuit.source)
    # The others are anywhere below, the largest is in any place, and signs are any.
    x = (torch.rand(count, size, generator=generator).square() * largest[:, None]).long()
    x[torch.arange(count), torch.randint(0, size, (count,), generator=generator)] = largest
    x |= torch.randint(0, 2, x.shape, generator=generator) << circuit.source.bits - 1
    x[0] = 0
    return torch.cat([x, _words_of(whole)[:, None]], 1) if circuit.has_whole else x


def _elements(circuit: BlockCircuit, count: int, generator: torch.Generator) -> Tensor:
    """Elements at the corners of their format under a scale, or any, and all scales."""
    fmt, points = circuit.format.scale, corners(circuit.output)
    count += len(points)
    positive = torch.tensor([code for code in range(1 << min(fmt.bits, 16)) if not values_of(torch.tensor([code]), fmt).le(0).item()])
    scales = positive[torch.randint(0, len(positive), (count,), generator=generator)]
    whole = _wholes(count, generator)
    # A quarter have the smallest scales, under which float32's subnormal numbers count.
    is_small = torch.randint(0, 4, (count,), generator=generator) == 0
    smallest = positive[torch.randint(0, 8, (count,), generator=generator)]
    tiny = values_of(torch.randint(1 << 23, 8 << 23, (count,), generator=generator), FP32)
    scales, whole = torch.where(is_small, smallest, scales), torch.where(is_small, tiny, whole)
    factor = values_of(scales, fmt) * (whole if circuit.has_whole else 1.0)
    chosen = torch.cat([points, points[torch.randint(0, len(points), (count - len(points),), generator=generator)]])
    near = (_words_of(values_of(chosen, FP32) * factor) + torch.randint(-1, 2, (count,), generator=generator)).clamp(0, (1 << 32) - 1)
    x = torch.where(torch.randint(0, 4, (count,), generator=generator) == 0, weighted(count, generator), near)
    subnormal = torch.randint(0, 1 << 23, (count,), generator=generator)
    x = torch.where(is_small & (torch.randint(0, 2, (count,), generator=generator) == 0), subnormal | x & 1 << 31, x)
    columns = [_narrowed(x, circuit.source), scales, *([_words_of(whole)] if circuit.has_whole else [])]
    return torch.stack(columns, 1)


def _wholes(count: int, generator: torch.Generator) -> Tensor:
    """Scales of whole tensors: three quarters of them between 2**-20 and 2**20, the others any normal float32 number."""
    words = torch.randint((127 - 20) << 23, (127 + 20) << 23, (count,), generator=generator)
    anywhere = torch.randint(1 << 23, _INFINITY, (count,), generator=generator)
    return values_of(torch.where(torch.randint(0, 4, (count,), generator=generator) == 0, anywhere, words), FP32)


def _words_of(x: Tensor) -> Tensor:
    """Float32's bits, without a sign."""
    words: Tensor = x.view(torch.int32).long() & ((1 << 32) - 1)
    return words


def _narrowed(words: Tensor, source: Float) -> Tensor:
    """The codes of a source for float32's bits: infinities where it has fewer exponents."""
    return (
        words
        if source == FP32
        else encode(values_of(words, FP32), source, rounding="toward_zero", check=False).long() & ((1 << source.bits) - 1)
    )
