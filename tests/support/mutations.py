"""Faults of one operator in emitted modules: which of them change a result, and which golden vectors find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qsim.silicon import Circuit, vectors
from qsim.silicon.graphs import routine
from qsim_kernels.meanings.expressions import Symbol, needed

#: What an operator can be mistaken for.
_MISTAKES = {
    "+": ("-", "|"), "-": ("+",), "*": ("+",), "&": ("|", "^"), "|": ("&", "^"), "^": ("|", "&"), "<<": (">>",), ">>": ("<<",),
    "<": ("<=", "=="), "<=": ("<", "=="), "==": ("<", "!="), "min": ("max",), "max": ("min",), "where": ("swapped",),
}  # fmt: skip

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "&": np.bitwise_and, "|": np.bitwise_or, "^": np.bitwise_xor,
    "<<": lambda a, b: np.left_shift(a, np.clip(b, 0, 62)), ">>": lambda a, b: np.right_shift(a, np.clip(b, 0, 62)),
    "<": np.less, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal, "min": np.minimum, "max": np.maximum,
    "where": np.where, "swapped": lambda condition, a, b: np.where(condition, b, a),
    "signed": lambda x, bits: x - (x >> bits - 1 << bits),
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


def evaluated(result: Symbol, inputs: Mapping[str, Tensor], fault: tuple[int, str] | None, width: int) -> np.ndarray:
    """The values of a graph as a module computes them: each wire has so many bits as its values need.

    Args:
        result: The graph's result.
        inputs: The inputs by name.
        fault: The number of an operation and the operator in place of its own.
        width: The bits of the result.
    """
    values: dict[int, Any] = {}
    for symbol in needed([result]):
        if symbol.op == "input":
            values[symbol.order] = inputs[symbol.args[0]].numpy()
            continue
        op = fault[1] if fault is not None and fault[0] == symbol.order else symbol.op
        given = [values[x.order] if isinstance(x, Symbol) else np.int64(x) for x in symbol.args]
        value = np.asarray(_OPERATIONS[op](*given)).astype(np.int64)
        ones = (1 << symbol.known.width) - 1
        values[symbol.order] = value & ones if symbol.known.low >= 0 else value
    return np.asarray(values[result.order]) & ((1 << width) - 1)


def survey(count: int, seed: int) -> Outcome:
    """Try faults in the modules of several formats and roundings.

    Whether a fault changes a result is decided by golden vectors and by many more inputs: a million random ones, and the neighbours of all
    values of the format.
    """
    generator = torch.Generator().manual_seed(seed)
    circuits = [
        Circuit(fmt, op, rule)
        for fmt in ("e4m3", "e5m2", "e2m1", "int8")
        for op in ("round", "encode")
        for rule in ("nearest", "stochastic", "up")
    ]
    faults = harmful = found = 0
    missed: list[str] = []
    while faults < count:
        circuit = circuits[faults % len(circuits)]
        chosen = routine(circuit)
        assert isinstance(chosen.result, Symbol)
        symbols = [x for x in needed([chosen.result]) if x.op in _MISTAKES]
        symbol = symbols[int(torch.randint(0, len(symbols), (), generator=generator))]
        mistakes = _MISTAKES[symbol.op]
        fault = symbol.order, mistakes[int(torch.randint(0, len(mistakes), (), generator=generator))]
        golden = vectors(circuit)
        faults += 1
        wrong = evaluated(chosen.result, {"x": golden.x, "random": golden.random}, fault, chosen.width)
        if (wrong != golden.y.numpy()).any():
            harmful, found = harmful + 1, found + 1
            continue
        more = {"x": many(golden.x, generator)}
        more["random"] = torch.randint(0, 1 << 32, more["x"].shape, generator=generator)
        right = evaluated(chosen.result, more, None, chosen.width)
        if (evaluated(chosen.result, more, fault, chosen.width) != right).any():
            harmful += 1
            missed.append(f"{circuit.name}: {fault[1]} for {symbol.op} in {symbol!r:.200}")
    return Outcome(faults, harmful, found, tuple(missed))


def many(x: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers near those of golden vectors, and random ones."""
    near = x[torch.randint(0, len(x), (300_000,), generator=generator)] + torch.randint(-64, 65, (300_000,), generator=generator)
    return torch.cat([near.clamp(0, (1 << 32) - 1), torch.randint(0, 1 << 32, (700_000,), generator=generator)])
