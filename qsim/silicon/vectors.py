"""Golden vectors: inputs of a unit with the results that it must have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.silicon import inputs
from qsim.silicon.golden import results
from qsim.silicon.units import Unit


@dataclass(frozen=True, eq=False)
class Vectors:
    """Inputs of a unit and its results, as int64 codes.

    Attributes:
        unit: The unit.
        x: The inputs: codes of `unit.input`.
        random: Random integers of `unit.random_bits` bits; zeros where the unit reads none.
        y: The results: codes of `unit.output`.

    Example:
        >>> from qsim.silicon import Unit, vectors
        >>> golden = vectors(Unit("int4", "decode"))
        >>> len(golden), golden.x.tolist()[-2:], [hex(y) for y in golden.y.tolist()[-2:]]
        (16, [14, 15], ['0xc0000000', '0xbf800000'])
    """

    unit: Unit
    x: Tensor
    random: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


def vectors(unit: Unit, count: int = 4096, seed: int = 0) -> Vectors:
    """Golden vectors of a unit.

    If its input has at most 16 bits, these are all its inputs. Otherwise they are the corners of its format and random numbers with the
    weights of Berkeley TestFloat. With stochastic rounding each input comes with five random integers: the smallest, the largest, the two
    between which the result changes, and any.

    Args:
        unit: The unit.
        count: The number of random inputs.
        seed: Where random inputs and integers are drawn from.

    Example:
        >>> from qsim.silicon import Unit, vectors
        >>> golden = vectors(Unit("e2m1", "decode"))
        >>> [hex(y) for y in golden.y.tolist()[:4]]
        ['0x0', '0x3f000000', '0x3f800000', '0x3fc00000']
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    generator = torch.Generator().manual_seed(seed)
    x = inputs.codes(unit, count, generator)
    random = torch.zeros_like(x)
    if unit.random_bits:
        random = _random_integers(unit, x, generator)
        x = x.repeat(len(random))
        random = random.view(-1)
    return Vectors(unit, x, random, results(unit, x, random))


def _random_integers(unit: Unit, x: Tensor, generator: torch.Generator) -> Tensor:
    """Five random integers for each input, as rows."""
    last = (1 << unit.random_bits) - 1
    low, high = torch.zeros_like(x), torch.full_like(x, last)
    first = results(unit, x, low)
    # Results change once as random integers grow: between `low` and `high`, or not at all.
    for _ in range(unit.random_bits):
        middle = (low + high) // 2
        same = results(unit, x, middle) == first
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    drawn = torch.randint(0, last + 1, x.shape, generator=generator)
    return torch.stack([torch.zeros_like(x), torch.full_like(x, last), low, high, drawn])
