"""Graphs compute what the definition does, and what is known of each value holds."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import qsim
from qsim.silicon import Circuit
from qsim.silicon.golden import results
from qsim.silicon.graphs import routine
from qsim.silicon.inputs import corners, weighted
from qsim.silicon.printers import c
from qsim.silicon.printers.routines import Routine
from qsim_kernels import arithmetic
from qsim_kernels.meanings.expressions import OPERATIONS, Symbol, known, needed, word
from qsim_kernels.meanings.simplification import operation
from support import emitted

FORMATS = ["e4m3", "e5m2", "e2m1", "e4m3fnuz", "bf16", "int8", "e8m0", "e3m4", "Float(3, 2, subnormals=False)", "Float(5, 2, signed=False)"]


def evaluated(symbols: list[Symbol], inputs: dict[str, int]) -> dict[int, int]:
    """The value of each symbol, which must be what is known of it."""
    values: dict[int, int] = {}
    for symbol in symbols:
        given = [values[x.order] if isinstance(x, Symbol) else x for x in symbol.args]
        value = inputs[symbol.args[0]] if symbol.op == "input" else OPERATIONS[symbol.op](*given)
        facts = symbol.known
        assert facts.low <= value <= facts.high, symbol.op
        assert value & ~facts.may == 0, symbol.op
        assert facts.must & ~value == 0, symbol.op
        values[symbol.order] = value
    return values


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rounding", qsim.rounding.NAMED)
def test_graphs_give_golden_results(rounding: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for fmt, overflow in itertools.product(FORMATS, ("saturate", "nonfinite")):
        circuit = Circuit(fmt, "encode", rounding, overflow)
        points = corners(circuit.format)
        x = torch.cat([points[torch.randperm(len(points), generator=generator)[:40]], weighted(10, generator)])
        drawn = torch.randint(0, 1 << 32, x.shape, generator=generator)
        result = routine(circuit).result
        symbols = needed([result])
        pairs = zip(x.tolist(), drawn.tolist(), strict=True)
        found = [evaluated(symbols, {"x": a, "random": b})[result.order] for a, b in pairs]
        assert found == results(circuit, x, drawn).tolist(), circuit.name


def test_every_rule_holds_for_random_expressions() -> None:
    """Operations built at random, with and without simplification, have the same values."""
    generator = random.Random(7)
    for _ in range(150):
        rows = [{name: generator.getrandbits(8) for name in "abc"} for _ in range(8)]
        made: list[tuple[Any, list[int]]] = [(word(name, 8), [row[name] for row in rows]) for name in "abc"]
        made += [(number, [number] * 8) for number in (0, 1, 7, 8, 0x70, 255, -1)]
        for _ in range(14):
            op = generator.choice([name for name in OPERATIONS if name not in ("*", "signed", "named")])
            chosen = [generator.choice(made) for _ in range(3 if op == "where" else 2)]
            if op in ("<<", ">>"):
                chosen[1] = generator.choice([x for x in made if 0 <= known(x[0]).low <= known(x[0]).high <= 8])
            if op in ("//", "%"):
                chosen = [generator.choice([x for x in made if known(x[0]).low >= least]) for least in (0, 1)]
            values = [OPERATIONS[op](*row) for row in zip(*(column for _, column in chosen), strict=True)]
            result = operation(op, *(x for x, _ in chosen))
            symbols = needed([result])
            found = [evaluated(symbols, row)[result.order] if isinstance(result, Symbol) else result for row in rows]
            assert found == values, (op, chosen, result)
            made.append((result, values))


@pytest.mark.parametrize("bits", [32, 64])
def test_c_writes_the_smallest_integers(bits: int, tmp_path: Path) -> None:
    x, smallest = word("x", 8), -1 << bits - 1
    chosen = operation("where", x < 1, smallest, operation("where", x < 2, smallest + 1, 0))
    smallest_first = Routine("f", (), (x,), operation("<", chosen, 0) + operation("<", chosen, smallest + 1) & 3, 32)
    main = '#include <stdio.h>\nint main(void) { printf("%u%u%u", f(0), f(1), f(2)); return 0; }\n'
    (tmp_path / "f.c").write_text(c.header("f", (), [smallest_first]) + main)
    emitted.run(emitted.tool("gcc"), "-std=c99", *emitted.WARNINGS, *emitted.SANITIZED, "-o", tmp_path / "f", tmp_path / "f.c")
    assert emitted.run(tmp_path / "f") == "210"


def test_wide_integers_are_no_c() -> None:
    x = word("x", 64)
    with pytest.raises(ValueError, match="no integers of more than 64 bits"):
        c.function(Routine("f", (), (x,), (0 - x) >> 60 & 7, 32))


def test_symbols_cannot_be_branched_on() -> None:
    with pytest.raises(TypeError, match="a symbol has no value before code runs: select by `where`"):
        bool(word("x", 8) > 3)


def test_philox_runs_on_symbols() -> None:
    counter_and_key = [word(f"w{k}", 32) for k in range(6)]
    result = arithmetic.philox.philox(*counter_and_key)
    given = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    values = evaluated(needed(result), {f"w{k}": value for k, value in enumerate(given)})
    # Random123's known answer.
    assert [values[word.order] for word in result] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
