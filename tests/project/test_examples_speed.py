"""`compare_speed.py`: both sides do the same work, missing packages are named, and others' failures are theirs."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Float
from support.running_examples import FOLDER


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("compare_speed")


def float_quantize(x: Tensor, exp: int, man: int, rounding: str) -> Tensor:
    """Round with qsim as QPyTorch would."""
    return qsim.quantize(x, Float(exp, man, specials="none"), rounding=rounding)


def install(monkeypatch: pytest.MonkeyPatch, module: str, **contents: Any) -> None:
    """A stand-in for a package."""
    for end in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[module]).update(contents)


def run(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["compare_speed.py", *words, "--device", "cpu", "--elements", "64", "--repeats", "1"])
    example.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("bias", [True, False])
def test_qpytorchs_way_is_the_same_layer_where_both_round_alike(example: Any, bias: bool) -> None:
    # A different format at each point, so that mix-ups are visible.
    formats = [Float(*bits, specials="none") for bits in ((4, 4), (3, 5), (4, 1), (5, 3), (4, 2))]
    points = FivePoint(*formats[:2], act_bwd=formats[2], weight_bwd=formats[3], grad=formats[4])
    ours = qsim.nn.Linear(5, 4, bias, points=points)
    theirs = example.QPyTorchLinear(ours, points, float_quantize)
    assert theirs.weight is not ours.weight
    x, g = torch.randn(6, 5), torch.randn(6, 4)
    results = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(g)
        results.append([y, given.grad, *(parameter.grad for parameter in layer.parameters())])
    assert len(results[0]) == 3 + bias
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert example.QPyTorchLinear(nn.Linear(5, 4, dtype=torch.bfloat16), points, float_quantize).weight.dtype == torch.float32


def test_optimizers_have_the_matching_modes(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    for _, module, name, _, _, needs_gpu in example.ADAMW:
        if module != "torch.optim" and not needs_gpu:

            def make(params: Any, lr: float, module: str = module, **options: Any) -> torch.optim.Optimizer:
                asked.append((module, options))
                return torch.optim.SGD(params, lr)

            install(monkeypatch, module, **{name: make})
    races = [race for race in example.optimizer("cpu", 64) if len(race) == 4]
    assert [(peer, work) for peer, work, *_ in races] == [
        (peer, f"{count}, {update}")
        for peer, update in (("torch", "nearest"), ("torch", "stochastic"), ("torchao", "stochastic"), ("torch-optimi", "kahan"))
        for count in ("1 tensor", "24 tensors")
    ]
    assert asked == [("torchao.optim", {"bf16_stochastic_round": True})] * 2 + [("optimi", {"kahan_sum": True})] * 2
    for (_, work, theirs, ours), update in zip(races[::2], ("nearest", "stochastic", "stochastic", "kahan"), strict=True):
        (group,) = ours.__self__.param_groups  # type: ignore[union-attr]
        assert (group["update"], group["state"]) == (update, "bf16"), work
        mine, other = (step.__self__.param_groups[0]["params"][0] for step in (ours, theirs))  # type: ignore[union-attr]
        assert mine.data_ptr() != other.data_ptr()


def test_the_table(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, "qtorch.quant", float_quantize=float_quantize)
    monkeypatch.setitem(sys.modules, "torchao", None)
    _, nearest, stochastic, torchao, d9d = run(example, monkeypatch, capsys, "rounding").splitlines()
    assert nearest.split("  ")[0] == stochastic.split("  ")[0] == "QPyTorch"
    assert "E4M3, nearest" in nearest
    assert "not installed (pip install torchao)" in torchao
    assert d9d.endswith("runs on cuda only")
    monkeypatch.setattr(example, "LAYER", (8, 4, 2))
    assert "8 × 4 → 2" in run(example, monkeypatch, capsys, "linear")


def test_a_peer_that_fails_is_not_called_missing(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no compiler")

    install(monkeypatch, "qtorch.quant", float_quantize=broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        run(example, monkeypatch, capsys, "rounding")
