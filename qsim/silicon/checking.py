"""Results of another implementation compared with golden ones: what differs first, and which step of the definition it concerns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsim.formats import Format
from qsim.formats.base import shortest
from qsim.rounding import DOWN, NEAREST, NEAREST_DOWN, NEAREST_UP, UP
from qsim.silicon.golden import results, values_of
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
}


@dataclass(frozen=True)
class Difference:
    """A result that differs.

    Attributes:
        index: Its place among the vectors.
        x: The input's code.
        random: The random integer.
        got: The result.
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
        count: The number of results.
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
    wrong = (golden != vectors.y).nonzero().view(-1)
    if not len(wrong):
        return Comparison(len(vectors), 0, None, {})
    part = Vectors(circuit, vectors.x[wrong], vectors.random[wrong], vectors.y[wrong])
    steps = _steps(part, golden[wrong])
    counts = Counter(steps)
    first = _difference(part, golden[wrong], int(wrong[0]), steps[0])
    return Comparison(len(vectors), len(wrong), first, {step: counts[step] for step in STEPS if step in counts})


def _steps(vectors: Vectors, golden: Tensor) -> list[str]:
    """The step of the definition that each wrong result concerns."""
    circuit, fmt = vectors.circuit, vectors.circuit.format
    if circuit.operation == "decode":
        return ["value"] * len(vectors)
    x, got, expected = (values_of(codes, kind).double() for codes, kind in _parts(vectors, golden).values())
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
    found = torch.stack(list(tests.values())).long().argmax(0)
    return [list(tests)[k] for k in found.tolist()]


def _parts(vectors: Vectors, golden: Tensor) -> dict[str, tuple[Tensor, Format]]:
    """The codes of inputs, results and golden results, and the formats that they are of."""
    circuit = vectors.circuit
    return {"x": (vectors.x, circuit.input), "got": (vectors.y, circuit.output), "expected": (golden, circuit.output)}


def _difference(vectors: Vectors, golden: Tensor, index: int, step: str) -> Difference:
    parts, bits, random = _parts(vectors, golden), vectors.circuit.random_bits, int(vectors.random[0])
    lines = [
        f"  {name:<9} {_shown(int(codes[0]), fmt.bits)}  {shortest(values_of(codes[:1], fmt).item())}"
        for name, (codes, fmt) in parts.items()
    ]
    if bits:
        lines.insert(1, f"  {'random':<9} {_shown(random, bits)}")
    x, got, expected = (int(codes[0]) for codes, _ in parts.values())
    return Difference(index, x, random, got, expected, step, "\n".join([*lines, f"  {'step':<9} {STEPS[step]}"]))


def _shown(code: int, bits: int) -> str:
    return f"0x{code:0{-(-bits // 4)}X}"
