"""Shares of weight updates cancelled by rounding: cases computed by hand, and what counts as an update."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import qsim
from qsim.diagnostics import CancelledUpdates, cancelled_updates
from support import bounds

RATE = 2.0**-10
# Below 1 bfloat16 has steps of 2**-8. At 1 an update of 2**-10 is cancelled, one of 2**-8 is not, one of 2**-9 is a tie that goes back to
# the even 1; with a zero gradient there is no update; a small weight moves.
WEIGHTS, GRADIENTS = (1.0, 1.0, 1.0, 1.0, 2.0**-9), (1.0, 4.0, 2.0, 0.0, 1.0)
BY_HAND = {"elements": 5, "updates": 4, "cancelled": 2}

Make = Callable[[list[nn.Parameter]], Optimizer]


def quantized(**options: str) -> Make:
    return lambda params: qsim.optim.Quantized(torch.optim.SGD(params, RATE), weight="bf16", **options)  # type: ignore[arg-type]


#: Optimizers, the dtype of their weights, and how many of the cancelled updates they carry.
CASES: dict[str, tuple[Make, torch.dtype, int]] = {
    "torch": (lambda params: torch.optim.SGD(params, RATE), torch.bfloat16, 0),
    "nearest": (lambda params: qsim.optim.SGD(params, RATE, update="nearest"), torch.bfloat16, 0),
    "nearest, float32": (lambda params: qsim.optim.SGD(params, RATE, update="nearest", format="bf16"), torch.float32, 0),
    "kahan": (lambda params: qsim.optim.SGD(params, RATE, update="kahan"), torch.bfloat16, 2),
    "rate in a tensor": (lambda params: qsim.optim.SGD(params, torch.tensor(RATE), update="nearest"), torch.bfloat16, 0),
    "quantized": (quantized(), torch.float32, 0),
    "accumulated": (quantized(accumulator="fp32"), torch.float32, 2),
}


def step(optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.to(parameter)
    optimizer.step()


def one(cancelled: CancelledUpdates) -> tuple[int, int, int]:
    (found,) = cancelled.updates
    return found.updates, found.cancelled, found.carried


@pytest.mark.parametrize("name", CASES)
def test_by_hand(device: torch.device, name: str) -> None:
    make, dtype, carried = CASES[name]
    parameter = nn.Parameter(torch.tensor(WEIGHTS, dtype=dtype, device=device))
    optimizer = make([parameter])
    for _ in range(2):
        # Twice: the second time, states exist, and Kahan's compensation restores lost updates.
        with cancelled_updates(optimizer) as cancelled:
            step(optimizer, parameter, torch.tensor(GRADIENTS))
        with torch.no_grad():
            parameter.copy_(torch.tensor(WEIGHTS))
        if carried:
            break
    (found,) = cancelled.updates
    assert {key: value for key, value in found.to_dict().items() if key in BY_HAND} == BY_HAND
    assert (found.share, found.carried, found.lost) == (0.5, carried, (2 - carried) / 4)


def test_updates_that_kahan_carries_are_applied_later() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = qsim.optim.SGD([parameter], RATE, update="kahan")
    with cancelled_updates(optimizer) as cancelled:
        for _ in range(4):
            step(optimizer, parameter, torch.ones(3))
    # After three updates, 3/4 of a step are more than half of one.
    assert cancelled.shares == {"0": [(0, 1.0), (1, 1.0), (2, 0.0), (3, 1.0)]}
    assert [entry.lost for entry in cancelled.updates] == [0.0] * 4


def test_stochastic_updates_arrive_one_in_four() -> None:
    count = 200_000
    parameter = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    optimizer = qsim.optim.SGD([parameter], RATE, update="stochastic", seed=1)
    with cancelled_updates(optimizer) as cancelled:
        step(optimizer, parameter, torch.ones(count))
    (found,) = cancelled.updates
    assert found.updates == count
    assert found.cancelled == int((parameter == 1).sum())
    bounds.check_share(found.cancelled, count, 0.75)


@pytest.mark.parametrize("ours", [False, True])
def test_momentum_and_decay_move_weights_too(ours: bool) -> None:
    def made(**options: float) -> tuple[nn.Parameter, Optimizer]:
        parameter = nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.bfloat16))
        if ours:
            return parameter, qsim.optim.SGD([parameter], RATE, update="nearest", **options)
        return parameter, torch.optim.SGD([parameter], RATE, **options)

    for options, first, second in (({}, 0, 0), ({"weight_decay": 0.1}, 1, 1), ({"momentum": 0.9}, 0, 1)):
        parameter, optimizer = made(**options)
        with cancelled_updates(optimizer) as cancelled:
            step(optimizer, parameter, torch.zeros(2))
            step(optimizer, parameter, torch.tensor([1.0, 0.0]))
            step(optimizer, parameter, torch.zeros(2))
        assert [entry.updates for entry in cancelled.updates] == [first, 1, second]
        assert all(entry.cancelled == entry.updates for entry in cancelled.updates)
    assert cancelled.updates[0].to_dict()["share"] is None
    assert math.isnan(cancelled.updates[0].share)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, qsim.optim.AdamW])
def test_adam(kind: type[Optimizer]) -> None:
    # The first update of Adam equals the learning rate, whatever the gradient.
    options = {"update": "nearest"} if kind is qsim.optim.AdamW else {}
    for rate, moved in ((2.0**-7, 2), (2.0**-10, 0)):
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = kind([parameter], rate, weight_decay=0.0, **options)  # type: ignore[call-arg]
        with cancelled_updates(optimizer) as cancelled:
            step(optimizer, parameter, torch.tensor([1e-3, 5.0, 0.0]))
        assert one(cancelled) == (2, 2 - moved, 0)


def test_a_rate_of_zero_makes_no_updates() -> None:
    for rate in (0.0, torch.tensor(0.0)):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], rate)
        with cancelled_updates(optimizer) as cancelled:
            step(optimizer, parameter, torch.ones(3))
        assert one(cancelled) == (0, 0, 0)


@pytest.mark.parametrize("fused", [None, True])
def test_steps_that_a_scaler_skips_have_no_updates(fused: bool | None) -> None:
    """Skipped by the step itself, which is then counted without updates, or by the scaler, which does not call the step."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = qsim.optim.SGD([parameter], RATE, update="nearest", format="bf16", fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad is not None
    parameter.grad[0] = math.inf
    with cancelled_updates(optimizer) as cancelled:
        scaler.step(optimizer)
        scaler.update()
    if fused:
        assert one(cancelled) == (0, 0, 0)
    else:
        assert not cancelled.updates


def test_every_other_step_by_names_and_nothing_left() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)).bfloat16()
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    cancelled = cancelled_updates(optimizer, 2, model=model)
    for _ in range(5):
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert {name: [number for number, _ in series] for name, series in cancelled.shares.items()} == {
        "0.weight": [0, 2, 4],
        "0.bias": [0, 2, 4],
    }
    assert [(total.step, total.elements) for total in cancelled.totals] == [(0, 9), (2, 9), (4, 9)]
    cancelled.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    optimizer.step()
    assert len(cancelled.updates) == 6
    named = torch.optim.SGD(model.named_parameters(), RATE)
    with cancelled_updates(named) as by_torch:
        named.step()
    assert list(by_torch.shares) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("update", ["nearest", "kahan", "stochastic"])
def test_training_gives_the_same_bits(update: str) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(1000).bfloat16())
        optimizer = qsim.optim.AdamW([parameter], 1e-3, update=update)
        cancelled = cancelled_updates(optimizer) if watched else None
        for _ in range(5):
            step(optimizer, parameter, torch.randn(1000))
        if cancelled is not None:
            assert 0 < cancelled.totals[-1].cancelled < 1000
            cancelled.close()
        ends.append((parameter.detach().clone(), torch.get_rng_state()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


def watched() -> CancelledUpdates:
    params = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, RATE)
    cancelled = cancelled_updates(optimizer)
    for factor in (1.0, 4.0):
        for parameter in params:
            parameter.grad = torch.full_like(parameter, factor)
        optimizer.step()
    cancelled.close()
    return cancelled


def test_tables_lines_and_plain_dictionaries(tmp_path: Path) -> None:
    cancelled = watched()
    assert str(cancelled).splitlines() == [
        "step 1",
        "parameter  elements  updates  cancelled  carried  lost",
        "0                 4        4        0 %      0 %   0 %",
        "1                 4        4        0 %      0 %   0 %",
        "all               8        8        0 %      0 %   0 %",
    ]
    cancelled.write(str(tmp_path / "updates.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "updates.jsonl").read_text().splitlines()]
    assert lines == cancelled.updates.rows()
    assert lines[0] == {"parameter": "0", "step": 0, "elements": 4, "updates": 4, "cancelled": 4, "carried": 0, "share": 1.0, "lost": 1.0}
    fresh = cancelled_updates(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    assert str(fresh) == "no step yet"


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = watched().plot()
    figure.savefig(tmp_path / "cancelled.png")
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "updates cancelled (%)")
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 0.0]] * 3
    with pytest.raises(ValueError, match="no step has been sampled yet"):
        cancelled_updates(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)).plot()


def test_invalid_input_raises_errors() -> None:
    with pytest.raises(TypeError, match=r"cancelled_updates: optimizer must be a torch.optim.Optimizer, got 3"):
        cancelled_updates(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cancelled_updates: every must be in 1…"):
        cancelled_updates(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), 0)


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for() -> None:
    parameter = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16, device="cuda"))
    optimizer = qsim.optim.AdamW([parameter], 1e-3, update="kahan")
    cancelled = cancelled_updates(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(cancelled.updates) == 4
