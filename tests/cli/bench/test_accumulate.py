"""`qsim bench accumulate`: every accumulator is measured next to a native product."""

from __future__ import annotations

import json

import pytest

from qsim.cli import main


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "accumulate", "--device", "cpu", "--size", "8", "--repeats", "1", "--accumulators", "h100_fp8, Rounded('fp16')"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("8 × 8 × 8")
    assert "GFLOP/s" in lines[1]
    assert [line.split()[:3] for line in lines[2:]] == [["h100_fp8", "e4m3", "emulator"], ["Rounded('fp16')", "bf16", "emulator"]]


def test_units_with_formats_and_scales_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "b200_mxfp8, b200_nvfp4, cdna3_fp8, cdna3_tf32"
    assert main(["bench", "accumulate", "--device", "cpu", "--size", "40", "--repeats", "1", "--accumulators", chosen]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    formats = ["e4m3", "e2m1", "e4m3fnuz", "bf16"]
    assert rows == [[name, fmt, "emulator"] for name, fmt in zip(chosen.split(", "), formats, strict=True)]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "Rounded('fp16', chunk=16), a100_fp16"
    assert main(["bench", "accumulate", "--device", "cpu", "--size", "4", "--repeats", "1", "--json", "--accumulators", chosen]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["accumulator"], row["operands"]) for row in rows] == [("Rounded('fp16', chunk=16)", "bf16"), ("a100_fp16", "fp16")]
    assert all(row["flops"] == pytest.approx(2 * 4**3 / row["milliseconds"] * 1e3) for row in rows)


def test_a_unit_that_takes_no_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "accumulate", "--device", "cpu", "--accumulators", "Promoted(Aligned(4, 13, operands=('e3m0',)), 16)"]) == 2
    assert "takes none of bf16, fp16, e4m3, e4m3fnuz, e2m1, fp32" in capsys.readouterr().err
