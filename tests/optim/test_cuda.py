"""The optimizers on a GPU compared with the CPU, bit for bit: many tensors, unusual layouts, scalers, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.cuda_graphs import captured
from support.distributed_models import alike
from support.own_optimizers import BF16, SEED, full

pytestmark = pytest.mark.gpu

ADAM: dict[str, Any] = {"lr": 2.0**-5, "amsgrad": True}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (qsim.optim.AdamW, ADAM),
    "AdamW, Kahan": (qsim.optim.AdamW, {**ADAM, "update": "kahan", "state": "fp32"}),
    "AdamW, E4M3": (qsim.optim.AdamW, {**ADAM, "format": "e4m3", "state_rounding": "stochastic", "state": "bf16"}),
    "AdamW in the format": (qsim.optim.AdamW, {**ADAM, "arithmetic": "format", "betas": (0.9, 0.99)}),
    "SGD": (qsim.optim.SGD, {"lr": 2.0**-5, "momentum": 0.9, "weight_decay": 0.1}),
    "plain SGD, Kahan": (qsim.optim.SGD, {"lr": 2.0**-5, "update": "kahan"}),
}
every_optimizer = pytest.mark.parametrize(("make", "options"), list(OPTIMIZERS.values()), ids=list(OPTIMIZERS))

Lay = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Lay] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "every other": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
}
#: No elements, no dimensions, one element, blocks and a few more, and more than 64 tensors.
SHAPES = ((5, 7), (0,), (), (1,), (3, 0, 2), (2048,), (4097,), (33, 65), (3, 2, 4)) * 9


def parameters(device: str, dtype: torch.dtype = BF16, lay: Lay = LAYOUTS["contiguous"], shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(lay(torch.randn(shape, generator=generator).to(device, dtype))) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int, dtype: torch.dtype = BF16, lay: Lay = LAYOUTS["contiguous"]) -> None:
    """Assign gradients; the second parameter of three gets none at every other step."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device, dtype)
        p.grad_dtype = None
        p.grad = None if number % 3 == 1 and step % 2 else lay(gradient)


def both(
    make: Any, options: dict[str, Any], steps: int = 4, grad: torch.dtype = BF16, lay: Lay = LAYOUTS["contiguous"], **more: Any
) -> Any:
    """Weights and states after some steps on the CPU, with the usual memory layout, and on the GPU."""
    results = []
    for device, own in (("cpu", LAYOUTS["contiguous"]), ("cuda", lay)):
        params = parameters(device, lay=own, **more)
        optimizer = make(params, seed=SEED, **options)
        for step in range(4):
            give_gradients(params, step, grad, own)
            optimizer.step()
        results.append(full(optimizer))
    return results


@every_optimizer
@pytest.mark.parametrize("lay", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_many_tensors(make: Any, options: dict[str, Any], lay: Lay) -> None:
    assert alike(*both(make, options, lay=lay))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("grad", [torch.float64, torch.float32, torch.float16])
def test_dtypes(make: Any, options: dict[str, Any], dtype: torch.dtype, grad: torch.dtype) -> None:
    if dtype == torch.float16 and options.get("arithmetic") == "format":
        options = {**options, "eps": 1e-3}
    assert alike(*both(make, options, grad=grad, dtype=dtype, shapes=SHAPES[:9]))


def test_parameters_on_both_devices() -> None:
    """They may share a group; the numbers of parameters continue."""
    params = parameters("cpu", shapes=SHAPES[:9])
    mixed = [nn.Parameter(p.detach().clone().to("cuda" if number % 2 else "cpu")) for number, p in enumerate(params)]
    found = []
    for each in (params, mixed):
        optimizer = qsim.optim.AdamW(each, seed=SEED, **ADAM)
        for step in range(2):
            give_gradients(each, step)
            optimizer.step()
        found.append(full(optimizer))
    assert alike(*found)


def test_channels_last() -> None:
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        (p,) = parameters("cuda", shapes=((4, 3, 5, 6),))
        p.data = p.data.contiguous(memory_format=memory_format)
        optimizer = qsim.optim.AdamW([p], seed=SEED, **ADAM)
        for step in range(3):
            give_gradients([p], step, lay=lambda x, to=memory_format: x.contiguous(memory_format=to))
            optimizer.step()
        assert p.is_contiguous(memory_format=memory_format)
        found.append(full(optimizer))
    assert alike(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_on_the_device(dtype: torch.dtype) -> None:
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device, shapes=SHAPES[:9])
        lr = torch.tensor(0.3, dtype=dtype, device=device)
        optimizer = qsim.optim.AdamW(params, lr=lr, seed=SEED)
        for step in range(3):
            give_gradients(params, 2 * step)
            optimizer.step()
            lr.mul_(0.5)
        found.append(full(optimizer))
    assert alike(*found)


def test_the_host_never_waits() -> None:
    params = parameters("cuda", shapes=SHAPES[:9])
    optimizer = qsim.optim.AdamW(params, lr=torch.tensor(0.1, device="cuda"), seed=SEED)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0, device="cuda"), torch.tensor(0.0, device="cuda")
    give_gradients(params, 0)
    optimizer.step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@every_optimizer
@pytest.mark.parametrize("scale", [4.0, 3.0])
def test_scaled_and_skipped_steps(make: Any, options: dict[str, Any], scale: float) -> None:
    found = []
    for device in ("cpu", "cuda"):
        params = parameters(device, shapes=SHAPES[:9])
        optimizer = make(params, seed=SEED, **options)
        for step, skip in enumerate((0.0, 1.0, 0.0)):
            give_gradients(params, 2 * step)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale, device=device), torch.tensor(skip, device=device)
            before = full(optimizer) if skip else []
            optimizer.step()
            assert not skip or alike(full(optimizer), before)
        found.append(full(optimizer))
    assert alike(*found)


# CUDA graphs.


@every_optimizer
def test_replayed_steps_are_eager_ones(make: Any, options: dict[str, Any]) -> None:
    """Steps are counted on the device, so each replay draws its own noise and has its own corrections."""
    found = []
    for replayed in (False, True):
        params = parameters("cuda", shapes=SHAPES[:9])
        lr = torch.tensor(2.0**-5, device="cuda")
        optimizer = make(params, seed=SEED, **{**options, "lr": lr})
        for p in params:
            p.grad = torch.zeros_like(p)
        gradients = [parameters("cuda", shapes=SHAPES[:9], lay=lambda x, step=step: x * step) for step in range(1, 6)]

        def read(step: int, params: Any = params, gradients: Any = gradients) -> None:
            for p, g in zip(params, gradients[step], strict=True):
                p.grad.copy_(g.detach())

        call: Callable[[], Any] = optimizer.step
        for step in range(5):
            read(step)
            if replayed and step == 1:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
                call = graph.replay
            call()
            lr.mul_(0.75)
        found.append(full(optimizer))
    assert alike(*found)


def test_replays_draw_fresh_noise() -> None:
    p = nn.Parameter(torch.ones(4096, dtype=BF16, device="cuda"))
    optimizer = qsim.optim.SGD([p], lr=2.0**-9)
    p.grad = torch.ones_like(p)
    graph, _ = captured(optimizer.step)
    draws = []
    for _ in range(3):
        with torch.no_grad():
            p.fill_(1.0)
        graph.replay()
        draws.append(p.detach().clone())
    assert all(not torch.equal(draws[i], draws[j]) for i in range(3) for j in range(i))
    assert all(set(draw.tolist()) == {1.0, 1.0 - 2.0**-8} for draw in draws)


def test_a_seed_cannot_be_agreed_on_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsim.random.streams.is_one_of_several", lambda: True)
    p = nn.Parameter(torch.ones(16, dtype=BF16, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = qsim.optim.SGD([p], lr=2.0**-9)
    refused = pytest.raises(RuntimeError, match="agree on an optimizer's seed in its first step: take one before")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
