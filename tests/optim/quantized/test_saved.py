"""`qsim.optim.Quantized` saved, loaded and copied: the run continues bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import Quantizer
from qsim.optim import Quantized
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import MAKERS, all_of, parameters, rounded, run

NOISY = Quantizer("e4m3", "stochastic")
SEED = 77


OPTIONS: list[dict[str, Any]] = [
    {"weight": NOISY, "grad": NOISY, "state": Quantizer("bf16", "stochastic")},
    {"weight": NOISY, "state": Quantizer("bf16", "stochastic"), "accumulator": "fp32"},
    {"weight": "e4m3", "accumulator": Quantizer(qsim.Float(7, 15), "stochastic")},
]


def restored(optimizer: Quantized, name: str, options: dict[str, Any]) -> Quantized:
    """Load a checkpoint file into another optimizer, with another seed and other weights."""
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach() for group in optimizer.param_groups for p in group["params"]]], file)
    file.seek(0)
    state_dict, weights = torch.load(file)
    params = [nn.Parameter(torch.zeros_like(x)) for x in weights]
    fresh = Quantized(MAKERS[name](params), **options)
    fresh.load_state_dict(state_dict)
    with torch.no_grad():
        for p, x in zip(params, weights, strict=True):
            p.copy_(x)
    return fresh


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=["in place", "copies", "rounded copies"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion", "Adagrad"])
def test_a_run_is_resumed_to_the_bit(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    unbroken = Quantized(MAKERS[name](parameters(dtype)), **options)
    run(unbroken, range(3))
    resumed = restored(unbroken, name, options)
    assert (resumed.steps, resumed.seed) == (3, unbroken.seed)
    assert resumed.seed is not None
    torch.rand(3)
    assert alike(run(resumed, range(3, 6)), run(unbroken, range(3, 6)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("options", OPTIONS, ids=["in place", "copies", "rounded copies"])
def test_copies_go_on_alike(copied: Any, options: dict[str, Any]) -> None:
    optimizer = Quantized(MAKERS["AdamW"](parameters()), **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run(optimizer, range(2))
    other = copied(optimizer)
    before = all_of(other)
    assert repr(other) == repr(optimizer)
    expected = run(optimizer, range(2, 5))
    assert alike(all_of(other), before), "the copy has parameters of its own"
    assert alike(run(other, range(2, 5)), expected)


def test_accumulators_of_state_dicts_are_copied() -> None:
    optimizer = Quantized(MAKERS["AdamW"](parameters()), weight=NOISY, accumulator="fp32")
    run(optimizer, range(1))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = Quantized(MAKERS["AdamW"](parameters()), weight=NOISY, accumulator="fp32")
    other.load_state_dict(saved)
    run(other, range(1, 3))
    assert saved["param_groups"] == kept["param_groups"]
    for key, entry in kept["state"].items():
        assert saved["state"][key].keys() == entry.keys()
        assert same_bits(saved["state"][key]["quantized_accumulator"], entry["quantized_accumulator"])
    assert "quantized_accumulator" not in optimizer.state[optimizer.param_groups[0]["params"][0]]


@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_a_state_dict_of_torch_is_taken_over(accumulator: str | None) -> None:
    params = parameters()
    plain = MAKERS["AdamW"](params)
    run(plain, range(2))
    optimizer = Quantized(MAKERS["AdamW"](params), accumulator=accumulator, weight=NOISY, seed=SEED)
    optimizer.load_state_dict(plain.state_dict())
    assert (optimizer.steps, optimizer.seed) == (0, SEED)
    other = copy.deepcopy(plain)
    run(other, range(2, 3))
    run(optimizer, range(2, 3))
    weights = [p for group in other.param_groups for p in group["params"]]
    assert alike(list(params), [rounded(p, NOISY, SEED, 0, "weight", number) for number, p in enumerate(weights)])


def test_states_for_copies_are_loaded_in_their_precision() -> None:
    master = [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    plain = MAKERS["AdamW"](master)
    run(plain, range(2))
    params = parameters(torch.bfloat16)
    optimizer = Quantized(MAKERS["AdamW"](params), accumulator="fp32")
    optimizer.load_state_dict(plain.state_dict())
    assert same_bits(optimizer.state[params[0]]["exp_avg"], plain.state[master[0]]["exp_avg"])
    run(optimizer, range(2, 3))
