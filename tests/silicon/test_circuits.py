"""Circuits with several inputs, blocks, sums and Philox, in every language and with their vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qsim
from qsim.cli import main
from qsim.silicon import BlockCircuit, Dot, Philox, check, coverage, emit_circuits, read, text, vectors
from qsim.silicon.golden import results
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.synthesis import fpga
from qsim_kernels.meanings.expressions import needed
from support import emitted, mutations, philox_oracle

BLOCKS = [
    BlockCircuit("mxfp8", "scale"),
    BlockCircuit("mxfp4", "scale", source="bf16"),
    BlockCircuit("nvfp4", "scale"),
    BlockCircuit("mxfp8", rounding="stochastic"),
    BlockCircuit("mxfp4"),
    BlockCircuit("nvfp4"),
    BlockCircuit("nvfp4", rounding="up", source="bf16"),
]
OTHERS = [
    Philox(),
    Dot("Rounded('e4m3')", "e4m3"),
    Dot("Rounded('fp16', rounding='Stochastic(5)')", "e5m2", "e4m3", length=2),
    Dot("BlockScaled(2, 9, 1, 'e4m3', exact=True)", "e2m1"),
]
CIRCUITS = [*BLOCKS, *OTHERS]


def name_of(circuit: AnyCircuit) -> str:
    return circuit.name


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "mxfp6_e3m2"])
def test_blocks_are_encoded_as_the_library_does(name: str) -> None:
    """Golden vectors of scales, and of elements under them, are what `qsim.encode` gives for a tensor."""
    generator = torch.Generator().manual_seed(2)
    scale, element = BlockCircuit(name, "scale"), BlockCircuit(name)
    size = scale.format.size
    values = torch.randn(300, size, generator=generator) * torch.exp2(torch.randint(-20, 20, (300, 1), generator=generator))
    scaled = qsim.encode(values, name, check=False)
    words = values.view(torch.int32).long() & 0xFFFFFFFF
    whole = [] if scaled.outer is None else [(scaled.outer.view(torch.int32).long() & 0xFFFFFFFF).expand(300, 1)]
    none = torch.zeros(300, 0, dtype=torch.int64)
    scales = results(scale, torch.cat([words, *whole], 1), none)
    assert scales.tolist() == scaled.scales.view(-1).tolist()
    for place in (0, size - 1):
        x = torch.cat([words[:, place, None], scales[:, None], *whole], 1)
        assert results(element, x, none).tolist() == (scaled.codes[:, place].long() & (1 << element.output.bits) - 1).tolist()


def test_philox_is_that_of_the_paper() -> None:
    golden = vectors(Philox(), count=20)
    for row, words in zip(golden.x.tolist(), golden.y.tolist(), strict=True):
        assert tuple(words) == philox_oracle.block(tuple(row[:4]), tuple(row[4:]))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("circuit", CIRCUITS, ids=name_of)
def test_c_gives_golden_results(circuit: AnyCircuit, compiler: str, tmp_path: Path) -> None:
    golden = vectors(circuit, count=200)
    flags = ["-std=c99", *(emitted.SANITIZED if compiler == "gcc" else [])]
    assert torch.equal(emitted.rows_in_c(golden, tmp_path, compiler, flags), golden.y)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("circuit", CIRCUITS, ids=name_of)
def test_javascript_gives_golden_results(circuit: AnyCircuit, tmp_path: Path) -> None:
    golden = vectors(circuit, count=200)
    assert torch.equal(emitted.rows_in_node(golden, tmp_path), golden.y)


# `exhaustive.py modules` has all of them in Verilator, which compiles a program for each.
@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("circuit", "simulator"),
    [*((circuit, "icarus") for circuit in CIRCUITS), pytest.param(BlockCircuit("mxfp4"), "verilator", marks=pytest.mark.slow)],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_modules_pass_their_testbench(circuit: AnyCircuit, simulator: str, tmp_path: Path) -> None:
    golden = vectors(circuit, count=100)
    assert emitted.simulated(golden, tmp_path, simulator) == f"0 of {len(golden)} results differ"
    assert check(read((tmp_path / "results.hex").read_text())).differing == 0


@pytest.mark.parametrize("circuit", [Dot("Rounded('e2m1')", "e2m1"), BlockCircuit("mxfp4", rounding="stochastic")], ids=name_of)
def test_modules_with_registers_pass_their_testbench(circuit: AnyCircuit, tmp_path: Path) -> None:
    golden = vectors(circuit, count=100)
    right = f"0 of {len(golden)} results differ"
    assert emitted.simulated(golden, tmp_path, "icarus", stages=2) == right
    assert check(read((tmp_path / "results.hex").read_text())).differing == 0
    assert emitted.simulated(golden, tmp_path, "icarus", stages=2, registers=3).splitlines()[-1] != right


@pytest.mark.sampled(24)
@pytest.mark.parametrize("circuit", CIRCUITS, ids=name_of)
def test_modules_are_lint_clean(circuit: AnyCircuit, tmp_path: Path) -> None:
    for stages in (0, 2):
        emitted.lint(emit_circuits("systemverilog", [circuit], stages=stages), tmp_path, circuit.name)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", ["hex", "csv", "json"])
@pytest.mark.parametrize("circuit", CIRCUITS, ids=name_of)
def test_what_is_written_is_read_again(circuit: AnyCircuit, form: str) -> None:
    golden = vectors(circuit, count=20)
    again = read(text(golden, form), circuit if form == "csv" else None)
    assert again.circuit == circuit
    for name in ("x", "random", "y"):
        assert torch.equal(getattr(again, name), getattr(golden, name)), name


@pytest.mark.parametrize(
    ("circuit", "step"), [(BLOCKS[0], "scale"), (BLOCKS[4], "element"), (Philox(), "word"), (OTHERS[1], "last place")], ids=str
)
def test_reports_name_the_step(circuit: AnyCircuit, step: str) -> None:
    golden = vectors(circuit, count=20)
    report = check(replace(golden, y=golden.y ^ 1))
    assert report.differing == len(golden)
    assert step in report.steps
    assert report.first is not None
    assert "expected" in report.first.text


def test_coverage_of_a_multiply_add() -> None:
    report = coverage(vectors(Dot("Rounded('e2m1')", "e2m1"), count=100))
    assert (report.reached, report.codes) == (16, 16)
    assert report.ties is not None
    assert report.ties > 50
    assert len(report.missed) < len(report.branches) // 2
    assert str(coverage(vectors(Philox(), count=1))) == "15 vectors"
    assert str(coverage(vectors(BlockCircuit("mxfp4"), count=10))).endswith("reach 16 of 16 codes")


@pytest.mark.slow
def test_golden_vectors_find_faults_in_modules_with_several_inputs() -> None:
    outcome = mutations.survey(12, 2, mutations.SEVERAL_INPUTS[:2])
    assert outcome.harmful > 3
    assert outcome.missed == ()


def test_a_multiply_add_is_narrow() -> None:
    """Its wires are as wide as its sum needs, not as wide as float64."""
    assert max(x.known.width for x in needed(routine(Dot("Rounded('e4m3')", "e4m3")).results)) <= 16


@pytest.mark.slow
def test_a_multiply_add_can_be_synthesized() -> None:
    emitted.tool("yosys")
    circuit = Dot("Rounded('e4m3')", "e4m3")
    assert 223 < fpga(emit_circuits("systemverilog", [circuit]), circuit.name).luts < 460


def test_synthesis_has_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    emitted.tool("yosys")
    assert main(["cost", "e4m3", "--accumulate", "e4m3", "--limit", "0.01"]) == 1
    error = capsys.readouterr().err
    assert "qsim_dot1_rounded_e4m3_e4m3: synthesizing" in error
    assert "Yosys could not synthesize qsim_dot1_rounded_e4m3_e4m3 in 0.01 seconds: give it more, or fewer products" in error


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--format", "e4m3", "--accumulate", "fp16"], "qsim_dot1_rounded_fp16_e4m3("),
        (["--format", "e4m3", "--accumulate", "e5m2", "--times", "e5m2", "--rounding", "up"], "rounded_e5m2_rounding_up_e4m3_e5m2("),
        (["--format", "bf16", "--accumulate", "TwoStep(2, 24, 31)", "--length", "3"], "qsim_dot3_twostep_2_24_31_bf16("),
        (["--format", "e4m3", "--accumulate", "b200_mxfp8", "--length", "1"], "b[1], const uint32_t scale_a[1], const uint32_t scale_b[1]"),
        (["--format", "mxfp4", "--rounding", "stochastic"], "qsim_encode_mxfp4_stochastic("),
        (["--philox"], "qsim_philox("),
    ],
)  # fmt: skip
def test_command_emits(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emit", "c", *words]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["emit", "c"], "give a format, such as e4m3, or --philox"),
        (["emit", "c", "--format", "e4m3", "--times", "e5m2"], "--times and --length are for sums of products: give --accumulate, too"),
        (["cost", "e4m3", "--accumulate", "h100_fp8", "--rounding", "up"], "--rounding is for sums in a format: h100_fp8 has"),
        (["emit", "c", "--format", "mxfp4", "--overflow", "nonfinite"], "elements of blocks saturate, got --overflow nonfinite"),
        (["emit", "c", "--format", "mxfp4", "--operation", "decode"], "operation of blocks must be one of 'scale', 'encode', got 'decode'"),
        (["emit", "c", "--format", "fp8_128x128"], "needs a block format with blocks in one dimension, not tiles, got Block('e4m3', (128"),
        (["emit", "c", "--format", "Block('e4m3', 512)"], "a circuit needs a block format of at most 256 neighbours, got Block('e4m3', "),
        (["emit", "c", "--format", "Block('e2m1', 16, rule='stochastic')"], "a circuit computes scales without random bits, and the rule"),
        (["emit", "c", "--format", "mxfp4", "--source", "e4m3"], "source of blocks must be a format with infinities"),
        (["vectors", "--philox", "--form", "testfloat"], "TestFloat's text has results of one operand"),
    ],
)  # fmt: skip
def test_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
