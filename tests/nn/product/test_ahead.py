"""The scale of a whole transformed tensor, found in the read that rounds it untransformed: the bits of two reads, and no second one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn.product.along import along
from qsim.nn.product.observers import Observer, hold
from qsim.nn.product.sites import Site
from qsim.transforms import Hadamard

HALF = torch.bfloat16
POINTS = qsim.recipes.nvfp4().points


class Reads(TorchDispatchMode):
    """Counts rounding with a look ahead, and reads only for a scale of the whole tensor or its transform."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("qsim::")
        if name == "quantize_tiles_and_amaxes":
            self.found["ahead"] += 1
        elif name == "scales_of_tiles":
            self.found["alone" if args[3] else "plain"] += 1
        return function(*args, **(kwargs or {}))


def step(layer: qsim.nn.Linear, x: Tensor, g: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
    """The result and the gradients that are needed, and the two counts."""
    torch.manual_seed(3)
    with Reads() as reads:
        y = layer(x)
        needed = [each for each in (x, *layer.parameters()) if each.requires_grad]
        found = torch.autograd.grad(y, needed, g) if needed else ()
    return [y, *found], (reads.found["ahead"], reads.found["alone"])


def operands(device: torch.device, rows: tuple[int, ...] = (2, 32), columns: tuple[int, int] = (64, 96)) -> tuple[Tensor, Tensor]:
    return tuple((torch.randn(*rows, size, device=device).exp() - 1).to(HALF) for size in columns)  # type: ignore[return-value]


@pytest.mark.parametrize("points", [POINTS, qsim.recipes.nvfp4(outer="PerTensor('e8m0', 'ceil')").points], ids=["nvfp4", "powers"])
def test_one_read_serves_both_roundings_of_inputs_and_of_gradients(points: FivePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x, g) = qsim.nn.Linear(64, 96, points=points, dtype=HALF), operands(torch.device("cpu"))
    due, reads = step(layer, x.requires_grad_(), g)
    assert reads == (0, 2)
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: True)
    found, reads = step(layer, x, g)
    assert reads == (2, 0)
    assert all(map(torch.equal, found, due))


def test_the_scale_of_a_weight_that_is_rounded_again_is_found_once() -> None:
    layer, (x, g) = qsim.nn.Linear(64, 96, points=POINTS, dtype=HALF), operands(torch.device("cpu"))
    with Reads() as reads:
        layer(x.requires_grad_()).backward(g)
    assert reads.found["plain"] == 3  # with those of the input and of the gradient


def test_nothing_is_found_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: True)
    layer, (x, g) = qsim.nn.Linear(64, 96, bias=False, points=POINTS, dtype=HALF), operands(torch.device("cpu"))
    # Only the gradient of the weight: the gradient of the result is rounded once, after its transform.
    assert step(layer, x, g)[1] == (1, 1)
    assert step(layer.requires_grad_(False), x.requires_grad_(), g)[1] == (0, 0)
    assert step(layer, x.detach(), g)[1] == (0, 0)


TURNED = Quantizer("nvfp4", transform=Hadamard(16))


@pytest.mark.parametrize(
    "points",
    [
        FivePoint(act=TURNED, weight=TURNED, act_bwd=TURNED, weight_bwd=TURNED, grad=TURNED),
        FivePoint("nvfp4", "nvfp4", act_bwd="nvfp4", weight_bwd="nvfp4", grad="nvfp4"),
        FivePoint("mxfp4", None, act_bwd=TURNED, grad="mxfp4", grad_w=TURNED),
        FivePoint(
            "nvfp4",
            None,
            act_bwd=Quantizer("mxfp4", transform=Hadamard(16)),
            grad="nvfp4",
            grad_w=Quantizer("mxfp4", transform=Hadamard(16)),
        ),
        FivePoint("nvfp4", "nvfp4", act_bwd="requantized", weight_bwd="same", grad="nvfp4", grad_w=None),
    ],
    ids=["all transformed", "none transformed", "no whole before", "no whole after", "requantized"],
)
def test_other_points_take_a_read_for_each_rounding(points: FivePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: True)
    layer, (x, g) = qsim.nn.Linear(64, 96, points=points, dtype=HALF), operands(torch.device("cpu"))
    assert step(layer, x.requires_grad_(), g)[1][0] == 0


def sites() -> tuple[Site, Site]:
    """The two sites of an input."""
    lies = along("...mk,nk->mn")
    transform = POINTS.act_bwd.transform if isinstance(POINTS.act_bwd, Quantizer) else None
    plain = Site("act", Quantizer("nvfp4"), 0, lies["act"], merges=True)
    return plain, Site("act_bwd", TURNED, 0, lies["act_bwd"], merges=True, transform=transform)


@pytest.mark.parametrize(
    ("shape", "source", "carrier", "is_worthwhile"),
    [
        ((16384, 1024), HALF, HALF, True),
        ((8, 1024, 3072), HALF, HALF, True),
        ((512, 1024), HALF, HALF, False),
        ((16384, 1024), HALF, torch.float32, False),
        ((16384, 1024), torch.float32, torch.float32, False),
        ((16392, 1024), HALF, HALF, False),
        ((16384, 1000), HALF, HALF, False),
    ],
)
def test_kernels_look_ahead_in_large_matrices(
    shape: tuple[int, ...], source: torch.dtype, carrier: torch.dtype, is_worthwhile: bool
) -> None:
    plain, later = sites()
    with FakeTensorMode():
        assert plain.looks_ahead(torch.empty(shape, dtype=source, device="cuda"), later, carrier) == is_worthwhile
        assert not plain.looks_ahead(torch.empty(shape, dtype=source), later, carrier)


def test_observers_see_both_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x, g) = qsim.nn.Linear(64, 96, points=POINTS, dtype=HALF), operands(torch.device("cpu"))
    seen: list[str] = []

    class Sees(Observer):
        def rounds(self, site: Site, x: Tensor, seed: Tensor | None, rounded: Tensor | None = None) -> None:
            seen.append(site.name)

    for ahead in (False, True):
        monkeypatch.setattr(Site, "looks_ahead", lambda *_, ahead=ahead: ahead)
        with hold(Sees()):
            layer(x.requires_grad_()).backward(g)
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:])
    assert {"act", "act_bwd", "grad", "grad_w"} <= set(seen)


@pytest.mark.gpu
def test_large_tensors_are_read_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = qsim.nn.Linear(1024, 2080, bias=False, points=POINTS, dtype=HALF, device="cuda")
    x, g = operands(torch.device("cuda"), (2, 512), (1024, 2080))
    found, reads = step(layer, x.requires_grad_(), g)
    assert reads == (2, 0)
    monkeypatch.setattr(Site, "looks_ahead", lambda *_: False)
    due, reads = step(layer, x, g)
    assert reads == (0, 2)
    assert all(map(torch.equal, found, due))
