"""Tests of `qsim bench experts`: what is measured, and errors for bad arguments. Speed is not tested."""

from __future__ import annotations

import json

import pytest
import torch

import qsim
from qsim.cli import main
from qsim.cli.bench import _measured, experts
from qsim.cli.bench.experts import Experts, ExpertsSize

EXPERTS = ("bench", "experts", "--device", "cpu", "--seconds", "0.001")


def test_experts_are_compared_with_torchs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run the same model on the same number of rows; one of them rounds both products."""
    seen: list[float] = []

    def step(model: torch.nn.Module, size: ExpertsSize, *rest: object, **options: object) -> object:
        ends = torch.tensor([1, size.rows], dtype=torch.int32)
        seen.append(qsim.coverage(model, (torch.randn(size.rows, size.width), ends), backward=False).share)
        return lambda: None

    monkeypatch.setattr(experts, "_step", step)
    monkeypatch.setattr(_measured, "sustained", lambda steps, *rest: [0.002, 0.003])
    assert main([*EXPERTS, "--sizes", "2x8x16x32", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["size"], row["how"], row["ratio"]) == ("2 × 8 × 16 → 32", "eager", pytest.approx(1.5))
    assert seen == [0.0, 1.0]


def test_every_expert_gets_its_rows_and_every_gradient_is_computed_again(capsys: pytest.CaptureFixture[str]) -> None:
    model = Experts(ExpertsSize(2, 5, 4, 8), torch.device("cpu"), torch.float32)
    x, ends = torch.randn(5, 4), torch.tensor([2, 5], dtype=torch.int32)
    y = model(x, ends)
    for i, (start, end) in enumerate(((0, 2), (2, 5))):
        gate, up = (x[start:end] @ model.gate_up[i]).chunk(2, -1)
        torch.testing.assert_close(y[start:end], (torch.nn.functional.silu(gate) * up) @ model.down[i])
    assert main([*EXPERTS, "--sizes", "2x8x4x8"]) == 0
    heading, columns, row = capsys.readouterr().out.splitlines()
    assert heading.startswith("CPU, ")
    assert columns.split()[-1] == "ratio"
    assert row.startswith("2 × 8 × 4 → 8")
