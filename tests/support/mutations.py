"""Faults of one operator in emitted modules: which of them change a result, and which golden vectors find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qsim.silicon import BlockCircuit, Circuit, Dot, Philox, Vectors, several_inputs, vectors
from qsim.silicon.graphs import AnyCircuit, routine
from qsim_kernels.meanings.expressions import Symbol, needed

#: What an operator can be mistaken for.
_MISTAKES = {
    "+": ("-", "|"), "-": ("+",), "*": ("+",),
    "//": ("%",), "%": ("//",), "&": ("|", "^"), "|": ("&", "^"), "^": ("|", "&"), "<<": (">>",), ">>": ("<<",),
    "<": ("<=", "=="), "<=": ("<", "=="), "==": ("<", "!="), "min": ("max",), "max": ("min",), "where": ("swapped",),
}  # fmt: skip


def _quotient(a: Any, b: Any) -> Any:
    """A quotient, in which a divisor of zero gives all ones."""
    return np.where(b == 0, -1, a // np.where(b == 0, 1, b))


def _remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, a, a % np.where(b == 0, 1, b))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply,
    "//": _quotient, "%": _remainder, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor,
    "<<": lambda a, b: np.left_shift(a, np.clip(b, 0, 62)), ">>": lambda a, b: np.right_shift(a, np.clip(b, 0, 62)),
    "<": np.less, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal, "min": np.minimum, "max": np.maximum,
    "where": np.where, "swapped": lambda condition, a, b: np.where(condition, b, a),
    "signed": lambda x, bits: x - (x >> bits - 1 << bits),
    "named": lambda x, *_: x,
}  # fmt: skip


class Outcome(NamedTuple):
    """Faults that golden vectors find.

    Attributes:
        faults: Faults that were tried.
        harmful: Those that change the result of any of the inputs that were tried for that.
        found: Those that golden vectors find.
        missed: Descriptions of harmful faults that golden vectors do not find.
    """

    faults: int
    harmful: int
    found: int
    missed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.faults} faults, {self.harmful} change a result, golden vectors find {self.found}" + "".join(
            f"\n  missed: {x}" for x in self.missed
        )


#: Formats and roundings, and circuits with several inputs.
ROUNDINGS = tuple(
    Circuit(fmt, op, rule)
    for fmt in ("e4m3", "e5m2", "e2m1", "int8")
    for op in ("round", "encode")
    for rule in ("nearest", "stochastic", "up")
)
SEVERAL_INPUTS: tuple[AnyCircuit, ...] = (
    BlockCircuit("mxfp8", "scale", source="bf16"),
    BlockCircuit("mxfp4"),
    Dot("Rounded('e4m3')", "e4m3"),
    BlockCircuit("nvfp4", "scale", source="bf16"),
    BlockCircuit("nvfp4", rounding="stochastic", source="bf16"),
    Dot("Rounded('e5m2', rounding='Stochastic(4)')", "e4m3"),
    Philox(),
    Dot("BlockScaled(2, 9, 1, 'e4m3', exact=True)", "e2m1"),
)


def evaluated(results: Sequence[Any], inputs: Mapping[str, Tensor], fault: tuple[int, str] | None, width: int) -> np.ndarray:
    """The values of a graph, in rows, as a module computes them: each wire has so many bits as its values need.

    Args:
        results: The graph's results.
        inputs: The inputs by name.
        fault: The number of an operation and the operator in place of its own.
        width: The bits of each result.
    """
    values: dict[int, Any] = {}
    symbols = needed(results)
    # Python's integers hold the products of Philox.
    kind = np.int64 if all(symbol.known.width < 63 for symbol in symbols) else object
    for symbol in symbols:
        if symbol.op == "input":
            values[symbol.order] = inputs[symbol.args[0]].numpy().astype(kind)
            continue
        op = fault[1] if fault is not None and fault[0] == symbol.order else symbol.op
        given = [values[x.order] if isinstance(x, Symbol) else x for x in symbol.args]
        value = np.asarray(_OPERATIONS[op](*given)).astype(kind)
        ones = (1 << symbol.known.width) - 1
        values[symbol.order] = value & ones if symbol.known.low >= 0 else value
    return np.stack([values[x.order] & ((1 << width) - 1) for x in results], 1)


def survey(count: int, seed: int, circuits: Sequence[AnyCircuit] = ROUNDINGS) -> Outcome:
    """Try faults in the modules of several circuits.

    Whether a fault changes a result is decided by golden vectors and by many more inputs: of formats a million random ones, and the
    neighbours of all values; of other circuits ten times as many vectors, drawn in the same way, and as many random words.
    """
    generator = torch.Generator().manual_seed(seed)
    golden = {circuit: vectors(circuit) for circuit in circuits}
    more = {circuit: _more(golden[circuit], generator) for circuit in circuits}
    faults = harmful = found = 0
    missed: list[str] = []
    while faults < count:
        circuit = circuits[faults % len(circuits)]
        whole = routine(circuit)
        symbols = [x for x in needed(whole.results) if x.op in _MISTAKES]
        symbol = symbols[int(torch.randint(0, len(symbols), (), generator=generator))]
        mistakes = _MISTAKES[symbol.op]
        fault = symbol.order, mistakes[int(torch.randint(0, len(mistakes), (), generator=generator))]
        faults += 1
        wrong = evaluated(whole.results, _by_name(golden[circuit]), fault, whole.width)
        if (wrong != golden[circuit].y.view(len(wrong), -1).numpy()).any():
            harmful, found = harmful + 1, found + 1
            continue
        inputs = more[circuit]
        if (evaluated(whole.results, inputs, fault, whole.width) != evaluated(whole.results, inputs, None, whole.width)).any():
            harmful += 1
            missed.append(f"{circuit.name}: {fault[1]} for {symbol.op} in {symbol!r:.200}")
    return Outcome(faults, harmful, found, tuple(missed))


def _by_name(given: Vectors) -> dict[str, Tensor]:
    """The inputs of vectors by the names of a graph's inputs."""
    pairs = [(part, column) for part, column in given.columns if part.name != "y"]
    return {f"{part.name}[{k}]" if part.words else part.name: words for part, column in pairs for k, words in enumerate(column.T)}


def _more(golden: Vectors, generator: torch.Generator) -> dict[str, Tensor]:
    circuit = golden.circuit
    if isinstance(circuit, Circuit):
        x = many(golden.x, generator)
        return {"x": x, "random": torch.randint(0, 1 << 32, x.shape, generator=generator)}
    if isinstance(circuit, Philox):
        return {name: torch.randint(0, 1 << 32, (20_000,), generator=generator) for name in _by_name(golden)}
    x, random = several_inputs.drawn(circuit, 50_000, generator)
    drawn = _by_name(replace(golden, x=x, random=random, y=torch.zeros(len(x), 1)))
    if isinstance(circuit, BlockCircuit):  # whose scales are positive
        return drawn
    words = {part.name: part.bits for part, _ in golden.columns}
    return {
        name: torch.cat([column, torch.randint(0, 1 << words[name.partition("[")[0]], (50_000,), generator=generator)])
        for name, column in drawn.items()
    }


def many(x: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers near those of golden vectors, and random ones."""
    near = x[torch.randint(0, len(x), (300_000,), generator=generator)] + torch.randint(-64, 65, (300_000,), generator=generator)
    return torch.cat([near.clamp(0, (1 << 32) - 1), torch.randint(0, 1 << 32, (700_000,), generator=generator)])
