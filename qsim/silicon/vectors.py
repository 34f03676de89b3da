"""Golden vectors: inputs of a circuit with the results that it must have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsim.silicon import inputs, several_inputs
from qsim.silicon.circuits import Circuit
from qsim.silicon.golden import results
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.printers.routines import Parameter, parameters


@dataclass(frozen=True, eq=False)
class Vectors:
    """Inputs of a circuit and its results, as int64 codes.

    Attributes:
        circuit: The circuit.
        x: Inputs: codes of `circuit.input`, or rows of all inputs in order where there are several.
        random: Random integers of `circuit.random_bits` bits, or rows of them; zeros where the circuit reads none.
        y: Results: codes of `circuit.output`, or rows of them.

    Example:
        >>> from qsim.silicon import Circuit, vectors
        >>> golden = vectors(Circuit("int4", "decode"))
        >>> len(golden), golden.x.tolist()[-2:], [hex(y) for y in golden.y.tolist()[-2:]]
        (16, [14, 15], ['0xc0000000', '0xbf800000'])
    """

    circuit: AnyCircuit
    x: Tensor
    random: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    @property
    def columns(self) -> list[tuple[Parameter, Tensor]]:
        """The inputs, the random integers and the results by parameters, each with a row for every vector."""
        whole = routine(self.circuit)
        given = parameters(whole)
        sizes = [max(part.words, 1) for part in given if part.name != "random"]
        inputs = iter(self.x.view(len(self), sum(sizes)).split(sizes, 1))
        columns = [(part, self.random.view(len(self), -1) if part.name == "random" else next(inputs)) for part in given]
        count = len(whole.result) if isinstance(whole.result, tuple) else 0
        return [*columns, (Parameter("y", whole.width, count), self.y.view(len(self), -1))]


def vectors(circuit: AnyCircuit, count: int = 4096, seed: int = 0) -> Vectors:
    """Return golden vectors of a circuit: inputs, and the results that any implementation must have.

    If its input has at most 16 bits, these are all its inputs. Otherwise they are the corners of its format and random numbers with the
    weights of Berkeley TestFloat. With stochastic rounding each input comes with five random integers: the smallest, the largest, the two
    between which the result changes, and any. Sums have special operands, drawn ones of which many nearly cancel, and any random integers;
    there are fewer the more products they add.

    Args:
        circuit: The circuit.
        count: The number of random inputs.
        seed: Where random inputs and integers are drawn from.

    Example:
        >>> from qsim.silicon import Circuit, vectors
        >>> golden = vectors(Circuit("e2m1", "decode"))
        >>> [hex(y) for y in golden.y.tolist()[:4]]
        ['0x0', '0x3f000000', '0x3f800000', '0x3fc00000']
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(circuit, Circuit):
        x, random = several_inputs.drawn(circuit, count, generator)
        return Vectors(circuit, x, random, results(circuit, x, random))
    x = inputs.codes(circuit, count, generator)
    random = torch.zeros_like(x)
    if circuit.random_bits:
        random = _random_integers(circuit, x, generator)
        x = x.repeat(len(random))
        random = random.view(-1)
    return Vectors(circuit, x, random, results(circuit, x, random))


def _random_integers(circuit: Circuit, x: Tensor, generator: torch.Generator) -> Tensor:
    """Five random integers for each input, as rows."""
    last = (1 << circuit.random_bits) - 1
    low, high = torch.zeros_like(x), torch.full_like(x, last)
    first = results(circuit, x, low)
    # Results change once as random integers grow: between `low` and `high`, or not at all.
    for _ in range(circuit.random_bits):
        middle = (low + high) // 2
        same = results(circuit, x, middle) == first
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    drawn = torch.randint(0, last + 1, x.shape, generator=generator)
    return torch.stack([torch.zeros_like(x), torch.full_like(x, last), low, high, drawn])
