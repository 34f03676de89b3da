"""Tests of `qsim bench scaled`: what is measured, and errors for bad arguments. Speed itself is not tested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qsim.cli import main

TINY = ("--device", "cpu", "--elements", "2^14", "--repeats", "1")


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "scaled", *TINY, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_direction_and_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--formats", "mxfp4,fp8_128x128,nvfp4", "--roundings", "nearest", "--dtypes", "bf16:fp32")
    assert found["heading"].endswith("; 2^14 elements")
    # With a scale of the whole tensor, everything is read twice.
    expected = {("mxfp4", "last"): 6, ("mxfp4", "first"): 6, ("fp8_128x128", "both"): 6, ("nvfp4", "last"): 8, ("nvfp4", "first"): 8}
    assert {(row["format"], row["along"]): row["bytes"] for row in found["rows"]} == {key: 2**14 * n for key, n in expected.items()}
    for row in found["rows"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaled", *TINY, "--formats", "mxfp8", "--roundings", "nearest,stochastic", "--dtypes", "fp32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["format", "along", "rounding", "dtypes", "GB/s", "copy", "GB/s", "ratio", "×", "copy"]
    assert [line.split()[:3] for line in lines[2:]] == [["mxfp8", a, r] for a in ("last", "first") for r in ("nearest", "stochastic")]
