"""Results of another implementation compared with golden ones: what differs first, and which step of the definition it concerns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsim.formats import FP32, Format
from qsim.formats.base import shortest
from qsim.rounding import DOWN, NEAREST, NEAREST_DOWN, NEAREST_UP, UP
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox
from qsim.silicon.golden import results, values_of
from qsim.silicon.graphs import AnyCircuit
from qsim.silicon.printers.routines import Parameter
from qsim.silicon.vectors import Vectors

#: Steps of the definition, in the order in which they are tried, and what went wrong there.
STEPS = {
    "NaN": "round_bits: NaN stays NaN, or is the result of an overflow",
    "sign": "round_bits: the sign of the result",
    "overflow": "limited, beyond: what becomes of numbers beyond the largest value",
    "cleared bits": "cleared_bits: the result is not a value of the format",
    "underflow": "leaves_zero: numbers below the smallest value",
    "tie": "raised_by: a midpoint goes to the other neighbour",
    "neighbour": "raised_by: the number goes to the other neighbour",
    "code": "code_of: the value is right, but not its code",
    "value": "value_of: the value of a code",
    "far": "round_bits: the result is not a neighbour of the number",
    "special": "special_sum: infinities and NaN among the operands",
    "sign of a sum": "add_to_odd: the sign of the result",
    "last place": "onto_grid: the rounding of the sum",
    "sum": "add_to_odd, truncated_sum: the sum itself",
    "scale": "scale_of: the scale of a block",
    "element": "round_bits: an element divided by its scale",
    "word": "philox: a word of the result",
}


@dataclass(frozen=True)
class Difference:
    """A result that differs.

    Attributes:
        index: Its place among the vectors.
        x: The input's code; of several inputs the first.
        random: The random integer, or the first.
        got: The result, or the first.
        expected: What it must be.
        step: A key of `STEPS`.
        text: A description.
    """

    index: int
    x: int
    random: int
    got: int
    expected: int
    step: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """How results compare with golden ones.

    Attributes:
        count: Number of results.
        differing: How many differ.
        first: The first that differs, if any.
        steps: How many differ by each step of the definition.

    Example:
        >>> from dataclasses import replace
        >>> from qsim.silicon import Circuit, check, vectors
        >>> golden = vectors(Circuit("e2m1", "encode", "up", source="bf16"))
        >>> check(replace(golden, y=golden.y ^ 8)).steps
        {'NaN': 254, 'sign': 65282}
    """

    count: int
    differing: int
    first: Difference | None
    steps: dict[str, int]

    def __str__(self) -> str:
        if self.first is None:
            return f"all {self.count} results are right"
        lines = [f"{self.differing} of {self.count} results differ, first number {self.first.index + 1}:", self.first.text]
        lines.append("by step of the definition:")
        return "\n".join([*lines, *(f"  {count:>8}  {STEPS[step]}" for step, count in self.steps.items())])


def check(vectors: Vectors) -> Comparison:
    """Compare results of another implementation with golden ones.

    Args:
        vectors: The inputs with that implementation's results.

    Example:
        >>> from dataclasses import replace
        >>> from qsim.silicon import Circuit, check, vectors
        >>> golden = vectors(Circuit("e2m1", "encode", source="bf16"))
        >>> print(check(golden))
        all 65536 results are right
        >>> truncated = vectors(Circuit("e2m1", "encode", "toward_zero", source="bf16"))
        >>> report = check(replace(golden, y=truncated.y))
        >>> report.first.step, report.differing
        ('underflow', 696)
    """
    circuit = vectors.circuit
    golden = results(circuit, vectors.x, vectors.random)
    wrong = (golden != vectors.y).view(len(golden), -1).any(1).nonzero().view(-1)
    if not len(wrong):
        return Comparison(len(vectors), 0, None, {})
    part = Vectors(circuit, vectors.x[wrong], vectors.random[wrong], vectors.y[wrong])
    steps = _steps(part, golden[wrong])
    counts = Counter(steps)
    first = _difference(part, golden[wrong], int(wrong[0]), steps[0])
    return Comparison(len(vectors), len(wrong), first, {step: counts[step] for step in STEPS if step in counts})


def _steps(vectors: Vectors, golden: Tensor) -> list[str]:
    """The step of the definition that each wrong result concerns."""
    circuit = vectors.circuit
    if isinstance(circuit, Philox):
        return ["word"] * len(vectors)
    if isinstance(circuit, BlockCircuit):
        return ["scale" if circuit.operation == "scale" else "element"] * len(vectors)
    if isinstance(circuit, Dot):
        return _steps_of_sums(circuit, vectors, golden)
    if circuit.operation == "decode":
        return ["value"] * len(vectors)
    fmt, columns = circuit.format, ((vectors.x, circuit.input), (vectors.y, circuit.output), (golden, circuit.output))
    x, got, expected = (values_of(codes, kind).double() for codes, kind in columns)
    rounds = replace(circuit, operation="round")
    below, above, up, down, again = (
        values_of(results(replace(rounds, **changed), codes, torch.zeros_like(codes)), rounds.output)
        for changed, codes in (
            ({"rounding": DOWN}, vectors.x),
            ({"rounding": UP}, vectors.x),
            ({"rounding": NEAREST_UP}, vectors.x),
            ({"rounding": NEAREST_DOWN}, vectors.x),
            ({"rounding": NEAREST, "source": circuit.output, "overflow": "nonfinite"}, vectors.y),
        )
    )
    is_neighbour = (got == below) | (got == above)
    tests = {
        "code": (got == expected) & (got.signbit() == expected.signbit()) | got.isnan() & expected.isnan(),
        "NaN": x.isnan() | expected.isnan() | got.isnan(),
        "sign": got == -expected,
        "overflow": (x > fmt.max) | (x < fmt.min),
        "cleared bits": again.double() != got,
        "underflow": x.abs() < fmt.smallest,
        "tie": is_neighbour & (up != down),
        "neighbour": is_neighbour,
        "far": torch.ones_like(is_neighbour),
    }
    if circuit.operation == "round":
        del tests["code"]
    return _first(tests)


def _steps_of_sums(circuit: Dot, vectors: Vectors, golden: Tensor) -> list[str]:
    got, expected = (values_of(codes, circuit.total) for codes in (vectors.y, golden))
    return _first(
        {
            "special": ~got.isfinite() | ~expected.isfinite(),
            "sign of a sum": got == -expected,
            "last place": (vectors.y - golden).abs() <= 1,
            "sum": torch.ones_like(got, dtype=torch.bool),
        }
    )


def _first(tests: dict[str, Tensor]) -> list[str]:
    """The name of the first test that holds, for each result."""
    found = torch.stack(list(tests.values())).long().argmax(0)
    return [list(tests)[k] for k in found.tolist()]


def _difference(vectors: Vectors, golden: Tensor, index: int, step: str) -> Difference:
    *given, (output, got) = vectors.columns
    expected = golden.view(len(golden), -1)
    columns = [*((part.name, part, words) for part, words in given), ("got", output, got), ("expected", output, expected)]
    kinds = _kinds(vectors.circuit)
    lines = [f"  {name:<9} {_shown(words[0], part, kinds.get(part.name))}" for name, part, words in columns]
    x, random, y, right = (
        int(column.view(len(column), -1)[0, 0]) if column.numel() else 0 for column in (vectors.x, vectors.random, got, expected)
    )
    return Difference(index, x, random, y, right, step, "\n".join([*lines, f"  {'step':<9} {STEPS[step]}"]))


def _kinds(circuit: AnyCircuit) -> dict[str, Format]:
    """The formats whose codes parameters are."""
    if isinstance(circuit, Circuit):
        return {"x": circuit.input, "y": circuit.output}
    if isinstance(circuit, BlockCircuit):
        return {"x": circuit.source, "scale": circuit.format.scale, "whole": FP32, "y": circuit.output}
    if isinstance(circuit, Dot):
        return {name: fmt for name, (fmt, _) in circuit.factors.items()} | {"c": circuit.total, "y": circuit.total}
    return {}


def _shown(words: Tensor, part: Parameter, fmt: Format | None) -> str:
    codes = " ".join(f"0x{code:0{-(-part.bits // 4)}X}" for code in words.tolist())
    return codes if fmt is None else f"{codes}  {' '.join(shortest(x) for x in values_of(words, fmt).tolist())}"
