"""Golden vectors reach what they promise, are read again as they were written, and find what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qsim
from qsim.cli import main
from qsim.silicon import FORMS, BlockCircuit, Circuit, check, coverage, read, text, vectors
from qsim.silicon.golden import results
from qsim.silicon.inputs import corners, weighted
from support import emitted, mutations


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "odd"])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "int8", "e4m3fnuz"])
def test_vectors_are_what_the_library_gives(fmt: str, rounding: str) -> None:
    golden = vectors(Circuit(fmt, "encode", rounding), count=500)
    x = golden.x.to(torch.int32).view(torch.float32)
    if rounding != "stochastic":
        expected = qsim.encode(x, fmt, rounding, check=False)
        assert golden.y.tolist() == (expected.long() & 0xFF).tolist()
    low, high = (qsim.encode(x, fmt, rule, check=False).long() & 0xFF for rule in ("toward_zero", "odd"))
    if rounding == "stochastic":
        assert bool((golden.y == low).any())
        assert bool((golden.y != low).any())
        assert len(high) == len(golden)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "int8", "e8m0", "e4m3fnuz", "e3m4"])
def test_vectors_reach_every_code_and_both_ways_of_every_choice(name: str) -> None:
    for rounding in ("nearest", "stochastic"):
        report = coverage(vectors(Circuit(name, "round", rounding, "nonfinite")))
        # NaN of either sign is one result, and so are the zeros of formats without -0.
        nans = sum(
            bool(torch.isnan(qsim.decode(torch.tensor([code], dtype=torch.uint8), name)))
            for code in range(256 >> 8 - qsim.format(name).bits)
        )
        assert report.codes is not None
        assert report.reached >= report.codes - max(nans - 1, 0) - (nans > 0 and not qsim.format(name).has_inf and "fnuz" not in name)
        assert report.ties > 0
        # Powers of two have the same spacing everywhere, so that two limits are never reached.
        assert len(report.missed) <= (3 if name in ("e8m0", "int8") else 1), str(report)


def test_stochastic_vectors_hold_both_sides_of_each_threshold() -> None:
    circuit = Circuit("e4m3", "round", qsim.Stochastic(8))
    golden = vectors(circuit, count=200)
    x, drawn, y = (column.view(5, -1) for column in (golden.x, golden.random, golden.y))
    moves = y[0] != y[1]
    assert int(moves.sum()) > 500
    assert torch.equal(drawn[3] - drawn[2], torch.ones_like(drawn[2]).where(moves, drawn[3] - drawn[2]))
    assert torch.equal(y[2][moves], y[0][moves])
    assert torch.equal(y[3][moves], y[1][moves])
    assert torch.equal(x[0], x[4])
    assert set(drawn[0].tolist()) == {0}
    assert set(drawn[1].tolist()) == {255}


@pytest.mark.parametrize(("rounding", "codes"), [("up", [0x01, 0x80]), ("down", [0x00, 0x81]), ("nearest", [0x00, 0x80])])
def test_elements_whose_quotient_underflows_are_rounded_to_their_own_side(rounding: str, codes: list[int]) -> None:
    smallest = torch.tensor([[1, 0xFE], [1 << 31 | 1, 0xFE]])  # float32's smallest numbers under the largest scale
    assert results(BlockCircuit("mxfp8", rounding=rounding), smallest, torch.zeros(2, 0, dtype=torch.int64)).tolist() == codes


def test_corners_are_values_midpoints_and_their_neighbours() -> None:
    found = set(corners(qsim.format("e4m3")).tolist())
    for value in qsim.format("e4m3").values():
        bits = int(torch.tensor(value).view(torch.int32)) & 0xFFFFFFFF
        assert {bits, bits + 1} <= found or value == 0
    assert {1, 1 << 31 | 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF} <= found, "the ends of float32's subnormal and normal numbers"
    assert {0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0x43E80000, 0x43E7FFFF, 0x43E80001, 0x3A800000, 0x3A800001} <= found


def test_random_inputs_are_weighted_as_testfloats() -> None:
    x = weighted(40_000, torch.Generator().manual_seed(0))
    exponents, fractions = (x >> 23) & 0xFF, x & 0x7FFFFF
    # Half of the exponents are one of seventeen, and five standard deviations of a share of 40,000 are 1.25 %.
    special = sum((exponents == k).float().mean() for k in (0, 1, 2, 0x40, 0x70, *range(0x7B, 0x84), 0x8A, 0xC0, 0xFD, 0xFE, 0xFF))
    assert 0.5 - 0.0125 < float(special) < 0.75
    # Sums of two numbers with one run of ones or zeros have few runs; of any number, fewer than one in a thousand has less than six.
    changes = (fractions ^ fractions >> 1) & 0x3FFFFF
    few = sum((changes >> k & 1) for k in range(22)) < 6
    assert 0.75 - 0.0125 < float(few.float().mean()) < 0.79
    assert len(exponents.unique()) == 256


@pytest.mark.parametrize("form", ["hex", "csv", "json"])
@pytest.mark.parametrize(
    "circuit", [Circuit("e4m3", "decode"), Circuit("e2m1", "encode", qsim.Stochastic(5), source="fp32")], ids=["decode", "encode"]
)
def test_what_is_written_is_read_again(circuit: Circuit, form: str) -> None:
    golden = vectors(circuit, count=50)
    again = read(text(golden, form), circuit if form == "csv" else None)
    assert again.circuit == circuit
    for name in ("x", "random", "y"):
        assert torch.equal(getattr(again, name), getattr(golden, name))
    assert check(again).differing == 0


def test_testfloats_text_flags_inexact_results() -> None:
    lines = text(vectors(Circuit("e2m1", "encode", source="bf16")), "testfloat").splitlines()
    assert lines[0x3F80] == "3F80 2 00"
    assert lines[0x3F81] == "3F81 2 01"


@pytest.mark.parametrize(
    ("wrong", "step"),
    [
        ({"rounding": "nearest_away"}, "tie"),
        ({"rounding": "toward_zero"}, "neighbour"),
        ({"overflow": "nonfinite"}, "NaN"),
        ({"format": "e4m2"}, "neighbour"),
        ({"format": "e4m4"}, "cleared bits"),
    ],
)
def test_reports_name_the_step(wrong: dict[str, str], step: str) -> None:
    circuit = Circuit("e4m3")
    golden = vectors(circuit)
    report = check(replace(golden, y=vectors_of(replace(circuit, **wrong), golden.x)))
    assert report.differing > 0
    assert step in report.steps, report
    assert report.first is not None
    assert str(report).startswith(f"{report.differing} of {len(golden)} results differ, first number {report.first.index + 1}:")


def vectors_of(circuit: Circuit, x: torch.Tensor) -> torch.Tensor:
    """Another circuit's results for some inputs."""
    from qsim.silicon.golden import results

    return results(circuit, x, torch.zeros_like(x))


def test_golden_vectors_find_faults() -> None:
    outcome = mutations.survey(6, seed=1)
    assert outcome.harmful > 3
    assert outcome.missed == ()


def test_a_testbench_and_a_c_test_pass_and_fail(tmp_path: Path) -> None:
    circuit = Circuit("e2m1", "encode", "stochastic")
    golden = vectors(circuit, count=10)
    broken = replace(golden, y=golden.y ^ (golden.x == 0x3FC00000).long())
    emitted.tool("gcc")
    for name, tested, code in (("right", golden, 0), ("wrong", broken, 1)):
        assert (
            main(["emit", "c", "--format", "e2m1", "--operation", "encode", "--rounding", "stochastic", "-o", str(tmp_path / "e2m1.h")])
            == 0
        )
        (tmp_path / f"{name}.c").write_text(text(tested, "c", "e2m1.h"))
        emitted.run("gcc", *emitted.WARNINGS, "-std=c99", "-o", tmp_path / name, tmp_path / f"{name}.c")
        assert subprocess.run([tmp_path / name], capture_output=True).returncode == code


def test_a_testbench_drives_the_clock_of_a_module_with_registers(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["vectors", "e2m1", "--operation", "decode", "--form", "testbench"]
    assert main(command) == 0
    combinational = capsys.readouterr().out
    assert "clk" not in combinational
    assert "// Compares the combinational module qsim_decode_e2m1 with golden vectors" in combinational
    assert main([*command, "--stages", "2"]) == 0
    clocked = capsys.readouterr().out
    assert "// Compares the module qsim_decode_e2m1 of `--stages 2` with golden vectors" in clocked
    assert "logic clk = 0;" in clocked
    assert "circuit (.clk(clk), .x(x), .y(y));" in clocked
    assert "#1; repeat (2) begin clk = 1; #1; clk = 0; #1; end\n" in clocked


UNDRIVEN = """
module qsim_decode_e2m1(input logic [3:0] x, output logic [31:0] y);
endmodule
"""


def test_an_output_that_nothing_drives_differs_in_every_vector(tmp_path: Path) -> None:
    golden = vectors(Circuit("e2m1", "decode"))
    assert "if (y !== " in text(golden, "testbench"), "for an unknown output, `!=` is unknown, which is no difference"
    said = emitted.simulated(golden, tmp_path, "icarus", module=UNDRIVEN)
    assert said.endswith("16 of 16 results differ")
    assert said.count("differs: ") == 10


@pytest.mark.parametrize("form", [form for form in FORMS if form != "testbench"])
def test_stages_are_for_a_testbench(form: str) -> None:
    golden = vectors(Circuit("e2m1", "decode"))
    with pytest.raises(ValueError, match=f"stages are for a testbench, got form='{form}'"):
        text(golden, form, stages=2)


def test_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e2m1.hex"
    assert main(["vectors", "e2m1", "--source", "bf16", "--operation", "encode", "-o", str(file)]) == 0
    assert "qsim_encode_e2m1_nearest_from_bf16: 65536 vectors reach 16 of 16 codes and 14 ties" in capsys.readouterr().out
    assert main(["vectors", "--check", str(file)]) == 0
    assert capsys.readouterr().out == "qsim_encode_e2m1_nearest_from_bf16: all 65536 results are right\n"
    file.write_text(file.read_text().replace("3FC0_3", "3FC0_4"))
    assert main(["vectors", "--check", str(file)]) == 1
    assert "1 of 65536 results differ, first number 16321:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "vectors: FILE is malformed: the results do not name their circuit"),
        ("// circuit: round | e4m9x | NEAREST | saturate | fp32\n0_0\n", "the results name a circuit that does not exist"),
        ("// circuit: decode | Float(2, 1) | NEAREST | saturate | Float(2, 1)\n0_0_0_0\n", "vector 1 of qsim_decode_e2m1 needs 2 numbers"),
        ("// circuit: decode | Float(2, 1) | NEAREST | saturate | Float(2, 1)\n0_xyz\n", "numbers of results are hexadecimal"),
        ("// circuit: decode | Float(2, 1) | NEAREST | saturate | Float(2, 1)\n1F_0\n", "x of qsim_decode_e2m1 has 4 bits, got 0x1F"),
        ("// circuit: decode | Float(2, 1) | NEAREST | saturate | Float(2, 1)\n", "the results hold no vectors"),
        ('{"circuit": 3}', "the results are not JSON as `qsim vectors` writes it"),
    ],
)
def test_malformed_results(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results"
    file.write_text(content)
    assert main(["vectors", "--check", str(file)]) == 2
    error = capsys.readouterr().err
    assert (
        re.search(re.escape(message).replace("FILE", re.escape(str(file))), error)
        or message.removeprefix("vectors: FILE is malformed: ") in error
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vectors"], "give a format, such as e4m3, --philox, or --check with a file of results"),
        (["vectors", "e4m3", "--rounding", "up,down"], "vectors are those of one circuit: give one rounding and one operation, got 2"),
        (["vectors", "e4m3", "--count", "-1"], "count must not be negative, got -1"),
        (["vectors", "e4m3", "--stages", "2"], "--stages is for testbenches: give --form testbench, too"),
        (["vectors", "--check", "e4m3.hex", "--stages", "2"], "--stages is for testbenches: give --form testbench, too"),
        (["vectors", "e2m1", "--form", "testbench", "--stages", "65"], "stages must be in 0…64, got 65"),
        (["emit", "rust", "--format", "e4m3"], "language must be one of 'c', 'systemverilog', 'javascript', got 'rust'"),
    ],
)
def test_errors_of_commands(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_forms_have_a_command(tmp_path: Path) -> None:
    for form in FORMS:
        assert main(["vectors", "e2m1", "--operation", "decode", "--form", form, "-o", str(tmp_path / form)]) == 0
    assert json.loads((tmp_path / "json").read_text())["vectors"][1] == ["0x1", "0x3F000000"]
