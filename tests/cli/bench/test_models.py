"""Subjects of `qsim bench linear` and `train`: the models, steps, also in a CUDA graph, and their memory."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from qsim import cli
from qsim.cli.bench import _models
from qsim.cli.bench._counting import peak_growth
from qsim.cli.bench._models import SIZES, LanguageModel
from qsim.cli.bench._timing import forward_and_backward, replay

CPU = torch.device("cpu")


def test_the_small_gpt_has_gpt_2s_shapes() -> None:
    with torch.device("meta"):
        model = LanguageModel(SIZES["small"][0])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["tokens.weight"] == (50304, 768)
    assert shapes["positions.weight"] == (1024, 768)
    block = {name.removeprefix("blocks.11."): shape for name, shape in shapes.items() if name.startswith("blocks.11.")}
    assert block["qkv.weight"] == (2304, 768)
    assert block["merge.weight"] == (768, 768)
    assert block["up.weight"] == (3072, 768)
    assert block["down.weight"] == (768, 3072)
    # GPT-2 has 124439808 parameters with a vocabulary of 50257; this one is rounded up to a multiple of 128.
    assert sum(parameter.numel() for parameter in model.parameters()) == 124439808 + (50304 - 50257) * 768


def test_a_gpt_of_another_number_of_layers() -> None:
    (model, _, _), (usual, _, _) = (_models.Subject("gpt", "tiny", layers).make(CPU, torch.float32) for layers in (3, None))
    assert (len(model.blocks), len(usual.blocks)) == (3, 2)


def test_the_gpt_predicts_from_the_past_alone() -> None:
    model, (x, target), _ = _models.Subject("gpt", "tiny").make(CPU, torch.float32)
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    # Weights as small as the initial ones would hide a difference.
    for parameter in model.parameters():
        parameter.data.mul_(4)
    other = x.clone()
    other[:, 40:] = (other[:, 40:] + 1) % 256
    loss = model(x, target)
    model(other, target)
    assert torch.equal(logits[0][:, :40], logits[1][:, :40])
    assert not torch.equal(logits[0][:, 40:], logits[1][:, 40:])
    expected = nn.functional.cross_entropy(logits[0].flatten(0, 1), target.flatten(), reduction="sum")
    torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize("name", ["gpt", "conv"])
def test_every_variant_starts_from_the_same_model_and_batch(name: str) -> None:
    (a, batch, _), (b, other, _) = (_models.Subject(name, "tiny").make(CPU, torch.float32) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(batch, other, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(a.parameters(), b.parameters(), strict=True))


def test_a_step_of_a_layer_computes_every_gradient_again() -> None:
    layer = nn.Linear(4, 2)
    step = forward_and_backward(layer, torch.randn(8, 4), torch.randn(8, 2))
    step()
    assert layer.weight.grad is not None
    first = layer.weight.grad.clone()
    step()
    assert torch.equal(layer.weight.grad, first)
    assert first.abs().sum() > 0


# on a GPU


@pytest.mark.gpu
def test_replayed_steps_do_what_the_step_does() -> None:
    total = torch.zeros((), device="cuda")
    again = replay(lambda: total.add_(1))
    before = total.item()
    again()
    again()
    assert total.item() == before + 2


@pytest.mark.gpu
def test_growth_is_what_a_step_needs_beyond_what_was_there() -> None:
    there = torch.zeros(2**22, dtype=torch.uint8, device="cuda")
    assert peak_growth(lambda: there.add_(1)) == 0
    assert peak_growth(lambda: (there + 1).sum()) >= 2**22


def test_a_training_step_with_a_monitor_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "train", "--device", "cpu", "--models", "conv", "--seconds", "0.01", "--monitor", "1", "--json"]) == 0
    native, points, monitored = json.loads(capsys.readouterr().out)["rows"]
    assert monitored["variant"].startswith("five points, 1 step in 1 monitored (that one: x ")
    slower = float(monitored["variant"].rpartition("x ")[2])
    assert monitored["milliseconds"] / points["milliseconds"] == pytest.approx(slower, abs=1e-3)
    assert monitored["ratio"] == pytest.approx(monitored["milliseconds"] / native["milliseconds"])
