"""OutControl and `points.Channels` compared with their definitions; resumption, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.control import OutControl
from qsim.points import Channels, Rotated
from support.comparing import same_bits
from support.cuda_graphs import captured
from support.refusing import refused

WIDE, FOUR, EIGHT = (3, 17), qsim.Quantizer("mxfp4"), qsim.Quantizer("mxfp8")


def net(points: Any) -> nn.Module:
    torch.manual_seed(0)
    return qsim.convert(nn.Sequential(nn.Linear(40, 24)), points)


def inputs(number: int, shape: tuple[int, ...] = (2, 3, 40)) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    x[..., list(WIDE)] *= 30
    return x


def apart(x: Tensor, dim: int) -> Tensor:
    """The chosen channels in eight bits, the rest in four, each with blocks of its own along the last dimension."""
    chosen = torch.tensor(WIDE)
    rest = torch.tensor([i for i in range(x.shape[dim]) if i not in WIDE])
    result = torch.empty_like(x)
    for which, rounds in ((rest, FOUR), (chosen, EIGHT)):
        result.index_copy_(dim, which, rounds(x.index_select(dim, which)))
    return result


def test_channels_are_rounded_apart() -> None:
    x = inputs(1)
    assert torch.equal(Channels("mxfp4", "mxfp8", WIDE)(x), apart(x, -1))
    turned = x.mT.contiguous()
    assert torch.equal(Channels("mxfp4", "mxfp8", WIDE, dim=-2)(turned), apart(turned, -2))
    point = qsim.points.resolve(Channels("mxfp4", "mxfp8", WIDE).call or "")
    assert isinstance(point, Channels)
    assert torch.equal(point(x), apart(x, -1))


def test_the_products_of_a_layer_with_wider_channels() -> None:
    """Forward along channels, in the gradient of the weight along tokens, and only four bits in the gradient of the input."""
    model = net(qsim.FivePoint(FOUR, FOUR))
    control = OutControl(share=0.05, window=2).start(model)
    for number in range(2):
        model(inputs(number))
        control.step()
    assert control.channels == {"0": [*WIDE]}
    x, layer, upstream = inputs(2).requires_grad_(), model[0], inputs(3, (2, 3, 24))
    y = layer(x)
    y.backward(upstream)
    a, w, g = x.detach().double(), layer.weight.detach(), upstream.double()
    expected = apart(x.detach(), -1).double() @ apart(w, -1).double().T + layer.bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    tokens = apart(a.float().reshape(6, 40).T.contiguous(), -2).double()
    torch.testing.assert_close(layer.weight.grad.double(), (tokens @ g.reshape(6, 24)).T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), g @ FOUR(w.T.contiguous()).double().T, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]


def test_outliers_cost_less_precision() -> None:
    plain, controlled = net("tetrajet2"), net("tetrajet2")
    control = OutControl(window=1).start(controlled)
    x = inputs(1)
    controlled(x)
    control.step()
    exact = nn.functional.linear(x, plain[0].weight, plain[0].bias)  # type: ignore[arg-type]
    errors = [(model(x) - exact).norm() / exact.norm() for model in (plain, controlled)]
    assert errors[1] < 0.6 * errors[0]
    points = controlled[0].points
    assert qsim.FivePoint.from_dict(points.to_dict()) == points
    act_bwd = controlled[0].points.act_bwd.function
    assert act_bwd.dim == -2
    assert isinstance(act_bwd.point, Rotated)
    assert act_bwd.draws_signs
    controlled(x.requires_grad_()).square().sum().backward()
    assert controlled[0].weight.grad.isfinite().all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4.with_(last=0)", "fp8_hybrid", "lsq.with_(first=0, last=0)", "fp4_dge"])
def test_recipes_train_with_wider_channels(recipe: str) -> None:
    model = net(recipe)
    control = OutControl(window=1).start(model)
    for number in range(2):
        model(inputs(number)).square().mean().backward()
        control.step()
    assert control.channels
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_resumed_run_has_the_same_channels(stop: int) -> None:
    """Before, at the first step of, within and after the window."""
    whole, part = net("tetrajet2"), net("tetrajet2")
    control, first = (OutControl(window=2, first=2).start(model) for model in (whole, part))
    for number in range(6):
        whole(inputs(number))
        control.step()
        if number < stop:
            part(inputs(number))
            first.step()
    fresh, again = net("tetrajet2"), OutControl(window=2, first=2)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    again.start(fresh)
    for number in range(stop, 6):
        fresh(inputs(number))
        again.step()
    assert again.channels == control.channels
    assert same_bits(fresh(inputs(9)), whole(inputs(9)))


def test_numbers_are_on_the_device_but_not_in_the_state(device: torch.device) -> None:
    point, x = Channels("mxfp4", "mxfp8", WIDE).to(device), inputs(1).to(device)
    assert point.indices.device == x.device
    assert point.indices.tolist() == [*WIDE]
    assert not point.state_dict()
    assert torch.equal(point(x).cpu(), apart(inputs(1), -1))
    assert torch.equal(copy.deepcopy(point)(x), point(x))
    with torch.device("meta"):
        skeleton = Channels("mxfp4", "mxfp8", WIDE)
    assert torch.equal(skeleton.to("meta").to_empty(device=device)(x), point(x))


def test_compiled_code_has_no_break() -> None:
    point, x = Channels("e2m1", "e4m3", WIDE), inputs(1)
    assert torch.equal(torch.compile(point, backend="eager", fullgraph=True)(x), point(x))


@pytest.mark.gpu
def test_a_cuda_graph_contains_it() -> None:
    point, x = Channels("mxfp4", "mxfp8", WIDE).to("cuda"), inputs(1).to("cuda")
    graph, y = captured(lambda: point(x))
    x.copy_(inputs(2))
    graph.replay()
    assert torch.equal(y.cpu(), apart(inputs(2), -1))


def test_only_training_counts_and_hooks_are_gone() -> None:
    model = net("tetrajet2")
    control = OutControl(share=0.02, window=1).start(model)
    x = torch.zeros(4, 40)
    x[:, 5] = 1.0
    model(x)
    x[:, 6] = 100.0
    model.eval()(x)
    control.step()
    assert control.channels == {"0": [5]}
    assert not model[0]._forward_pre_hooks


def test_errors() -> None:
    model = net(qsim.FivePoint(weight="mxfp4"))
    with refused(ValueError, "OutControl: the model has no linear layer with rounded inputs and weights"):
        OutControl().start(model)
    with refused(ValueError, "Channels: channels must differ", "(1, 1)"):
        Channels("mxfp4", "mxfp8", (1, 1))
    with refused(ValueError, "Channels: a tensor of shape (2, 3) has no channel 3 in dimension -1"):
        Channels("mxfp4", "mxfp8", [3])(torch.ones(2, 3))
    with refused(ValueError, "share must be greater than 0 and less than 1", "1.5"):
        OutControl(share=1.5)
