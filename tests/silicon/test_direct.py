"""Encoders made from the direct definition: the library's codes, the definition's names, and no more cells than by hand."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qsim
from qsim.silicon import Circuit, emit, prove
from qsim.silicon.circuits import Operation
from qsim.silicon.golden import results
from qsim.silicon.graphs import routine
from qsim.silicon.inputs import corners
from qsim.silicon.printers import systemverilog
from qsim.silicon.printers.routines import Routine
from qsim.silicon.printers.verilog_words import KEYWORDS
from qsim.silicon.synthesis import fpga
from qsim_kernels.arithmetic import direct, direct_values as direct_values_definition, words
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.expressions import named, word
from qsim_kernels.numbers.carrier import grid_bits
from qsim_kernels.numbers.direct import direct_numbers, direct_rounding
from qsim_kernels.numbers.direct_values import direct_values
from qsim_kernels.numbers.encoding import Encoding
from support import emitted

HERE = Path(__file__).parent
FORMATS = [
    "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e2m1", "e3m2", "e2m3", "fp16", "bf16", "tf32",
    "Float(4, 3)", "Float(3, 0)", "Float(1, 0)", "Float(1, 3)", "Float(2, 2, bias=0)", "Float(8, 3, specials='ieee')",
    "Float(5, 3, signed=False)", "Float(4, 3, subnormals=False)", "Float(4, 3, subnormals='flush')",
    "Float(3, 1, subnormals=False, specials='ieee')",
    "int4", "int8", "Int(16)", "Int(8, symmetric=True)", "Fixed(8, 4)", "Fixed(8, 4, signed=False)", "Fixed(6, 10)",
]  # fmt: skip
STOCHASTIC = ["Stochastic(1)", "Stochastic(5, correction=True)", "Stochastic(16)", "stochastic"]
ROUNDINGS = [*(rule for rule in qsim.rounding.NAMED if rule != "stochastic"), *STOCHASTIC]
#: What the direct definition leaves to the one that rounds first: overflow to infinity or NaN in formats that have more values on one side.
LEFT_OUT = ("Float(5, 3, signed=False)", "int", "Int", "Fixed")


def selected(condition: Any, chosen: Any, other: Any) -> Any:
    """`where` of numbers and of arrays."""
    return (chosen if condition else other) if isinstance(condition, (int, np.bool_)) else np.where(condition, chosen, other)


#: The direct definitions on arrays.
ON_ARRAYS = bound(direct, {"where": selected, "MAGNITUDE": words.MAGNITUDE, "INFINITY": words.INFINITY, "MANTISSA": words.MANTISSA})
VALUES_ON_ARRAYS = bound(direct_values_definition, {"where": selected, "MAGNITUDE": words.MAGNITUDE, "INFINITY": words.INFINITY})


@lru_cache
def inputs(fmt: str) -> Tensor:
    """Values of a format, midpoints and their neighbours, every seventh bfloat16 number, and random words of all lengths."""
    generator = torch.Generator().manual_seed(4)
    points = corners(qsim.format(fmt))
    shifts = torch.randint(0, 23, (2000,), generator=generator)
    near = torch.randint(100 << 23, 150 << 23, (2000,), generator=generator) >> shifts << shifts
    signs = torch.randint(0, 2, (2000,), generator=generator) << 31
    some = points[torch.randperm(len(points), generator=generator)[:6000]]
    return torch.cat([some, torch.arange(0, 1 << 16, 7) << 16, near | signs, torch.randint(0, 1 << 32, (1000,), generator=generator)])


def direct_of(circuit: Circuit) -> Any:
    """The numbers of a circuit's direct definition, or `None`."""
    how = grid_bits(circuit.format.grid, wide=False)
    if circuit.operation == "round":
        return direct_rounding(how, circuit.rule)
    return direct_numbers(Encoding(circuit.format.grid, circuit.rule, circuit.format.coding), how)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("operation", ["encode", "round"])
def test_results_are_those_of_rounding_first(operation: Operation, fmt: str, rounding: str) -> None:
    compared = 0
    for overflow in ("saturate", "saturate_symmetric", "nonfinite"):
        try:
            circuit = Circuit(fmt, operation, rounding, overflow)
        except ValueError:  # the format has neither infinities nor NaN
            continue
        numbers = direct_of(circuit)
        if numbers is None:
            assert overflow == "nonfinite"
            assert fmt.startswith(LEFT_OUT)
            continue
        x = inputs(fmt)
        random = torch.randint(0, 1 << circuit.random_bits, x.shape, generator=torch.Generator().manual_seed(6))
        computed = ON_ARRAYS.bits_of_rounded if operation == "round" else ON_ARRAYS.code_of_rounded
        assert computed(x.numpy(), random.numpy(), *numbers).tolist() == results(circuit, x, random).tolist(), circuit.name
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("fmt", [*FORMATS, "e3m4", "Int(24)", "uint8"])
def test_values_are_those_of_codes(fmt: str) -> None:
    """All codes are compared, or half a million of those with more bits."""
    circuit = Circuit(fmt, "decode")
    numbers = direct_values(circuit.format.grid, circuit.format.coding, grid_bits(circuit.format.grid, wide=False))
    assert numbers is not None
    spare = max(circuit.format.bits - 19, 0)
    codes = torch.arange(0, 1 << circuit.format.bits, (1 << spare) - (spare > 0) or 1)
    assert VALUES_ON_ARRAYS.bits_of_code(codes.numpy(), *numbers).tolist() == results(circuit, codes, codes).tolist()


def test_every_input_of_16_bits() -> None:
    x = torch.arange(1 << 16) << 16
    circuit = Circuit("Float(2, 2, bias=0)", "encode")
    numbers = direct_of(circuit)
    assert np.array_equal(ON_ARRAYS.code_of_rounded(x.numpy(), 0, *numbers), results(circuit, x, torch.zeros_like(x)).numpy())


@pytest.mark.parametrize("fmt", ["nf4", "e8m0"])
def test_other_formats_are_rounded_first(fmt: str) -> None:
    """Tables and formats without zero have no direct definition."""
    assert direct_rounding(grid_bits(qsim.format(fmt).grid, wide=False), qsim.rounding.resolve("nearest").rule("saturate")) is None


@pytest.mark.parametrize(("language", "file"), [("systemverilog", "encode_e4m3.sv"), ("c", "encode_e4m3.h")])
def test_modules_read_as_the_definition(language: Any, file: str) -> None:
    """Where the definition or a printer changed on purpose: write the text again and read it."""
    text = emit(language, "e4m3", operations=["encode"], name="encode_e4m3")
    assert text.replace(f"qsim {qsim.__version__}", "qsim") == (HERE / "emitted" / file).read_text()


def variables() -> set[str]:
    """The names of the variables of the direct definition."""
    nodes = ast.walk(ast.parse(inspect.getsource(direct)))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


ENCODERS = [
    Circuit(fmt, "encode", rule, source=source)
    for fmt, rule, source in itertools.product(
        ("e4m3", "e5m2fnuz", "int8", "Float(4, 3, subnormals=False)"), ("nearest", "up", "odd", "Stochastic(8)"), ("fp32", "bf16")
    )
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("circuit", ENCODERS, ids=lambda circuit: circuit.name)
def test_wires_have_names_of_the_definition(circuit: Circuit) -> None:
    text = systemverilog.module(routine(circuit))
    wires = re.findall(r"^  wire (?:\[\d+:0\] )?(\w+) =", text, flags=re.MULTILINE)
    assert len(wires) == len(set(wires)) >= 12
    named_by_printer = {"unused", "is_less"}
    assert {re.sub(r"_\d+$", "", wire) for wire in wires} <= variables() | named_by_printer
    assert not KEYWORDS & set(wires)
    # Icarus computes an expression in a cast as wide as the cast makes it, and Yosys reads ~8'(x) as (~8)'(x).
    assert "'(" not in text


@pytest.mark.slow
def test_yosys_reads_modules_that_round(tmp_path: Path) -> None:
    """A zero-extended wire can be inverted."""
    (tmp_path / "round.sv").write_text(emit("systemverilog", "e4m3", ["nearest", "odd"]))
    emitted.run(emitted.tool("yosys"), "-q", "-p", f"read_verilog -sv {tmp_path / 'round.sv'}; proc")


def test_keywords_are_no_wires(tmp_path: Path) -> None:
    """Names that SystemVerilog has taken, and those of the module's ports, get a number."""
    x = word("x", 8)
    small = named("small", "A keyword.", 1, x & 15)
    again = named("x", "", 2, small + 1)
    text = systemverilog.module(Routine("f", (), (x,), again ^ small, 8))
    assert re.findall(r"wire (?:\[\d+:0\] )?(\w+) =", text)[:2] == ["small_2", "x_2"]
    assert "  // A keyword.\n" in text
    (tmp_path / "f.sv").write_text(text)
    emitted.run(emitted.tool("iverilog"), "-g2012", "-o", tmp_path / "f.vvp", tmp_path / "f.sv")


BY_HAND = {
    "encode_e4m3": Circuit("e4m3", "encode"),
    "encode_e5m2": Circuit("e5m2", "encode"),
    "encode_e2m1": Circuit("e2m1", "encode", source="bf16"),
    "encode_e2m2b0": Circuit("Float(2, 2, bias=0)", "encode", source="bf16"),
    "encode_int8": Circuit("int8", "encode"),
    "round_e4m3": Circuit("e4m3"),
    "round_e4m3_from_bf16": Circuit("e4m3", source="bf16"),
    "decode_e4m3": Circuit("e4m3", "decode"),
    "decode_e5m2": Circuit("e5m2", "decode"),
    "decode_e2m1": Circuit("e2m1", "decode"),
    "decode_int8": Circuit("int8", "decode"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_modules_take_no_more_cells_than_by_hand(name: str) -> None:
    """In lookup tables and inverters."""
    emitted.tool("yosys")
    circuit = BY_HAND[name]
    by_hand = fpga((HERE / "by_hand" / f"{name}.sv").read_text(), name)
    assert fpga(systemverilog.module(routine(circuit)), circuit.name).luts <= by_hand.luts


@pytest.mark.parametrize("name", BY_HAND)
def test_modules_by_hand_compute_the_same(name: str) -> None:
    """For all inputs; otherwise they were no references."""
    emitted.tool("yosys")
    assert prove(BY_HAND[name], (HERE / "by_hand" / f"{name}.sv").read_text()) is None
