"""Proofs by Yosys: emitted modules are right for every input, and faults have counterexamples."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import qsim
from qsim.cli import main
from qsim.silicon import Circuit, emit, prove, proving
from qsim.silicon.checking import STEPS
from support import emitted

FORMATS = ["e4m3", "e5m2", "e4m3fnuz", "e3m2", "e2m3", "e2m1", "int8", "int4", "Float(2, 2, bias=0)", "Float(4, 3, subnormals='flush')"]
ROUNDINGS = [*(rule for rule in qsim.rounding.NAMED if rule != "stochastic"), "Stochastic(8)", "Stochastic(5, correction=True)"]
CIRCUITS = [
    Circuit(fmt, operation, rule, source=source)
    for fmt, operation, rule, source in itertools.product(FORMATS, ("encode", "round"), ROUNDINGS, ("fp32", "bf16"))
]
CIRCUITS += [Circuit(fmt, "decode") for fmt in (*FORMATS, "fp16", "Int(16)")]
CIRCUITS += [Circuit(fmt, operation, "up", "nonfinite") for fmt in ("e4m3", "e5m2") for operation in ("encode", "round")]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("circuit", CIRCUITS, ids=lambda circuit: circuit.name)
def test_emitted_modules_are_proven(circuit: Circuit) -> None:
    emitted.tool("yosys")
    assert prove(circuit) is None


FAULTS = [
    ("guard & (sticky | kept[0])", "guard & sticky"),
    ("guard & (sticky | kept[0])", "guard"),
    ("trailing | lost", "lost"),
    ("trailing | lost", "trailing"),
    ("field < 8'h79", "field < 8'h78"),
    ("field < 8'h75", "field < 8'h74"),
    ("10'h21f", "10'h220"),
    ("is_nan ? 7'h7f : 7'h7e", "7'h7e"),
    ("~is_nan & sign", "sign"),
    ("field[3:0] + 4'h8", "field[3:0] + 4'h9"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_faults_have_counterexamples(right: str, wrong: str) -> None:
    """The library finds the result of the counterexample wrong, too, and names the step of the definition."""
    emitted.tool("yosys")
    text = emit("systemverilog", "e4m3", operations=["encode"])
    assert text.count(right) == 1
    found = prove(Circuit("e4m3", "encode"), text.replace(right, wrong))
    assert found is not None
    assert found.first is not None
    assert found.differing == 1
    assert f"  {found.steps[found.first.step]:>8}  {STEPS[found.first.step]}" in str(found)


def test_random_bits_are_part_of_the_counterexample() -> None:
    emitted.tool("yosys")
    text = emit("systemverilog", "e4m3", "Stochastic(4)", operations=["encode"])
    assert text.count("{7'h0, random}") == 1
    found = prove(Circuit("e4m3", "encode", "Stochastic(4)"), text.replace("{7'h0, random}", "{7'h0, random[3:1], 1'b0}"))
    assert found is not None
    assert found.first is not None
    assert found.first.random & 1


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emitted.tool("yosys")
    assert main(["prove", "e2m1", "--operation", "encode,decode"]) == 0
    lines = ["qsim_encode_e2m1_nearest: proven for every input", "qsim_decode_e2m1: proven for every input"]
    assert capsys.readouterr().out.splitlines() == lines
    text = emit("systemverilog", "e2m1", operations=["encode"])
    (tmp_path / "mine.sv").write_text(text.replace("sticky | kept[0]", "sticky"))
    assert main(["prove", "e2m1", "--operation", "encode", "--module", str(tmp_path / "mine.sv")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("qsim_encode_e2m1_nearest: ")
    assert "step" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mxfp4"], "proofs are for roundings, codes and values of one format, got qsim_scale_mxfp4"),
        (["e2m1", "--module", "mine.sv"], "--module is one circuit: choose --operation and --rounding, which mean 3"),
    ],
)
def test_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", *words]) == 2
    assert message in capsys.readouterr().err


def test_texts_that_cannot_be_compared() -> None:
    emitted.tool("yosys")
    with pytest.raises(ValueError, match="module must be SystemVerilog with a module, got a text without one"):
        prove(Circuit("e2m1", "encode"), "// nothing")
    with pytest.raises(RuntimeError, match="Yosys cannot prove qsim_encode_e2m1_nearest: "):
        prove(Circuit("e2m1", "encode"), "module mine (input wire [31:0] a, output wire [3:0] y);\n  assign y = a[3:0];\nendmodule\n")


def test_an_undriven_output_is_not_proven() -> None:
    emitted.tool("yosys")
    text = emit("systemverilog", "e2m1", operations=["encode"])
    assert text.count("assign y = {negative, rounded};") == 1
    found = prove(Circuit("e2m1", "encode"), text.replace("assign y = {negative, rounded};", "assign y[2:0] = rounded;"))
    assert found is not None
    assert found.first is not None


def test_what_yosys_does_not_decide_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def undecided(script: str, folder: Path, action: str, limit: float | None) -> None:
        (folder / "proof.txt").write_text("Interrupted.\n")

    monkeypatch.setattr(proving, "run_yosys", undecided)
    with pytest.raises(
        RuntimeError, match=r"^prove qsim_encode_e2m1_nearest: Yosys neither proved the module nor found a wrong result:\nInterrupted\.$"
    ):
        prove(Circuit("e2m1", "encode"))
