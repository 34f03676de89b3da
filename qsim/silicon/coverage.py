"""Coverage of vectors: the codes, ties and branches of the definition that they reach."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.accumulators import Rounded
from qsim.formats import FP32
from qsim.functional import encode
from qsim.rounding import NEAREST_DOWN, NEAREST_UP
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.golden import results, values_of
from qsim.silicon.values import Meaning
from qsim.silicon.vectors import Vectors
from qsim_kernels import arithmetic
from qsim_kernels.meanings import python, torch as meaning
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.carrier import DOUBLE, Carrier, counts_wide, grid_bits, rounding_bits, used_bits, variant_of
from qsim_kernels.numbers.encoding import coding_bits

#: Wider formats have too many codes to count.
_COUNTED_BITS = 16


class Branch(NamedTuple):
    """A choice in the definition.

    Attributes:
        place: Its file and line.
        text: The line.
        taken: For how many vectors the condition holds.
        other: For how many it does not.
    """

    place: str
    text: str
    taken: int
    other: int


@dataclass(frozen=True)
class VectorCoverage:
    """Codes, ties and branches that vectors reach.

    Attributes:
        count: Number of vectors.
        reached: How many codes of the format are results, or inputs of `decode`; none of Philox.
        codes: How many codes the format has; `None` if they are too many to count.
        ties: How many inputs, or sums of one product, are midpoints between two values; `None` of others.
        branches: Choices of the definition, but of blocks and Philox.

    Example:
        >>> from qsim.silicon import Circuit, coverage, vectors
        >>> print(coverage(vectors(Circuit("e4m3", "decode"))))
        256 vectors reach 256 of 256 codes and 0 ties
        8 of 8 ways through the definition's 4 choices are taken
    """

    count: int
    reached: int
    codes: int | None
    ties: int | None
    branches: tuple[Branch, ...]

    @property
    def missed(self) -> tuple[Branch, ...]:
        """The choices that went one way only."""
        return tuple(branch for branch in self.branches if not (branch.taken and branch.other))

    def __str__(self) -> str:
        if not self.reached:
            return f"{self.count} vectors"
        of = "" if self.codes is None else f" of {self.codes}"
        ties = "" if self.ties is None else f" and {self.ties} ties"
        lines = [f"{self.count} vectors reach {self.reached}{of} codes{ties}"]
        if not self.branches:
            return lines[0]
        ways = 2 * len(self.branches) - len(self.missed)
        lines.append(f"{ways} of {2 * len(self.branches)} ways through the definition's {len(self.branches)} choices are taken")
        lines += [f"  never {'true' if not branch.taken else 'false'}: {branch.place}: {branch.text}" for branch in self.missed]
        return "\n".join(lines)


def coverage(vectors: Vectors) -> VectorCoverage:
    """Count the codes, ties and branches that vectors reach.

    Example:
        >>> from qsim.silicon import Circuit, coverage, vectors
        >>> report = coverage(vectors(Circuit("e2m1", "encode", source="bf16")))
        >>> report.reached, report.codes, report.ties
        (16, 16, 14)
    """
    circuit = vectors.circuit
    if isinstance(circuit, Philox):
        return VectorCoverage(len(vectors), 0, None, None, ())
    if isinstance(circuit, (Dot, BlockCircuit)):
        fmt = circuit.total if isinstance(circuit, Dot) else circuit.output
        ties, branches = _of_sums(circuit, vectors) if isinstance(circuit, Dot) else (None, ())
        codes = 1 << fmt.bits if fmt.bits <= _COUNTED_BITS else None
        return VectorCoverage(len(vectors), len(vectors.y.unique()), codes, ties, branches)
    countable = circuit.format.bits <= _COUNTED_BITS
    if circuit.operation == "round":
        reached = encode(values_of(vectors.y, circuit.output), circuit.format, overflow="nonfinite", check=False)
    else:
        reached = vectors.x if circuit.operation == "decode" else vectors.y
    ties = 0
    if circuit.operation != "decode":
        x, zeros = vectors.x.unique(), torch.zeros(1, dtype=torch.int64)
        up, down = (results(replace(circuit, operation="round", rounding=rule), x, zeros) for rule in (NEAREST_UP, NEAREST_DOWN))
        ties = int((up != down).sum())
    return VectorCoverage(
        len(vectors), len(reached.unique()), 1 << circuit.format.bits if countable else None, ties, tuple(_branches(circuit, vectors))
    )


def _of_sums(circuit: Dot, vectors: Vectors) -> tuple[int | None, tuple[Branch, ...]]:
    """Count the sums of one product that are midpoints, if they are rounded once, and the choices of the definition."""
    adder, recorder, ties = circuit.accumulator, _ChoiceCounter(), None
    results(circuit, vectors.x, vectors.random, Meaning(DOUBLE, recorder.for_integers))
    if isinstance(adder, Rounded) and circuit.length == 1 and adder.product is None:
        ends = (Rounded(adder.format, rounding=rule, overflow=adder.overflow) for rule in (NEAREST_UP, NEAREST_DOWN))
        up, down = (results(replace(circuit, accumulator=end), vectors.x, torch.zeros(len(vectors), 0)) for end in ends)
        ties = int((up != down).sum())
    return ties, tuple(recorder.branches())


def _branches(circuit: Circuit, vectors: Vectors) -> list[Branch]:
    """Run the definition and count which way each choice goes."""
    recorder = _ChoiceCounter()
    grid, coding = circuit.format.grid, circuit.format.coding
    coder = grid_bits(grid, wide=counts_wide(grid, coding))
    if circuit.operation == "decode":
        codes = recorder.meaning(arithmetic.codes, coder.carrier)
        codes.value_of(vectors.x.to(torch.int64 if coder.carrier == DOUBLE else torch.int32), *coding_bits(grid, coding, coder))
        return recorder.branches()
    how, rule = rounding_bits(grid, circuit.rule, wide=False), circuit.rule
    functions = recorder.meaning(arithmetic.rounding, how.carrier)
    drawn = functions.random_bits(vectors.random << 32 - rule.bits, used_bits(how.carrier, rule.bits, rule.correction))
    functions.round_bits(_bits(values_of(vectors.x, circuit.source), how.carrier), drawn, how, variant_of(how, rule))
    if circuit.operation == "encode":
        rounded = values_of(results(replace(circuit, operation="round"), vectors.x, vectors.random), FP32)
        recorder.meaning(arithmetic.codes, coder.carrier).code_of(_bits(rounded, coder.carrier), *coding_bits(grid, coding, coder))
    return recorder.branches()


def _bits(x: Tensor, carrier: Carrier) -> Tensor:
    """Float32 numbers in a carrier's bits."""
    return x.double().view(torch.int64) if carrier == DOUBLE else x.view(torch.int32)


class _ChoiceCounter:
    """A meaning of the vocabulary for tensors that counts which way choices go."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, int], list[int]] = {}
        self._functions: dict[ModuleType, SimpleNamespace] = {}

    def meaning(self, module: ModuleType, carrier: Carrier) -> SimpleNamespace:
        """The functions of a module of the arithmetic."""
        vocabulary = self._vocabulary(module, vars(meaning.rounding(carrier) if module is arithmetic.rounding else meaning.codes(carrier)))
        vocabulary["to_word"] = lambda x: x.to(torch.int64)
        vocabulary["carries"] = lambda a, b: (-((a + b) >> carrier.drawn)).to(torch.int64 if carrier == DOUBLE else torch.int32)
        return bound(module, vocabulary)

    def for_integers(self, module: ModuleType) -> SimpleNamespace:
        """The functions of a module of the arithmetic for Python's integers, in float64's bits."""
        if module not in self._functions:
            self._functions[module] = self._for_integers(module)
        return self._functions[module]

    def _for_integers(self, module: ModuleType) -> SimpleNamespace:
        vocabulary = self._vocabulary(module, vars(python.functions(module, DOUBLE)))
        if module is arithmetic.sums:
            round_bits = self.for_integers(arithmetic.rounding).round_bits
            vocabulary["round_bits"] = lambda bits, drawn, grid, rule: round_bits(bits, drawn, grid, variant_of(grid, rule))
        return bound(module, vocabulary)

    def _vocabulary(self, module: ModuleType, plain: Mapping[str, Any]) -> dict[str, Any]:
        vocabulary = {name: given for name, given in plain.items() if name not in vars(module) or not _is_defined_in(module, name)}
        return vocabulary | {name: self._recording(plain[name], compare) for name, compare in _COMPARED.items()}

    def _recording(self, function: Callable[..., Any], compare: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any) -> Any:
            frame, condition = sys._getframe(1), compare(*args)
            counts = self._counts.setdefault((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti), [0, 0])
            holds, count = (int((condition != 0).sum()), condition.numel()) if isinstance(condition, Tensor) else (bool(condition), 1)
            counts[0] += holds
            counts[1] += count - holds
            return function(*args)

        return record

    def branches(self) -> list[Branch]:
        """The choices, in the order of the text."""
        return [
            Branch(f"{Path(file).name}:{line}", linecache.getline(file, line).strip(), *counts)
            for (file, line, _), counts in sorted(self._counts.items())
        ]


#: The choices of the vocabulary, and the condition of each.
_COMPARED: dict[str, Callable[..., Any]] = {
    "where": lambda condition, chosen, other: condition,
    "minimum": lambda a, b: a < b,
    "maximum": lambda a, b: a > b,
}


def _is_defined_in(module: ModuleType, name: str) -> bool:
    return getattr(vars(module)[name], "__module__", None) == module.__name__
