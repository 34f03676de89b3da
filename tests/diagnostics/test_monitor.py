"""The monitor's counts compared with a direct computation."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import Counts, Monitor
from qsim.functional.quantizer import short
from support.watched import POINTS, net

FIELDS = ("elements", "saturated", "underflowed", "exact", "nan", "zero", "infinite")


def direct(x: Tensor, rounded: Tensor, fmt: qsim.Format) -> tuple[dict[str, int], Counter[int]]:
    """The counts in Python's numbers, element by element."""
    found: Counter[str] = Counter(elements=x.numel())
    exponents: Counter[int] = Counter()
    for v, q in zip(x.double().flatten().tolist(), rounded.double().flatten().tolist(), strict=True):
        found["zero"] += v == 0
        found["nan"] += math.isnan(v)
        found["infinite"] += math.isinf(v)
        beyond = v > fmt.max or v < fmt.min
        found["saturated"] += beyond
        found["underflowed"] += v != 0 and q == 0 and not beyond
        found["exact"] += v == q and not beyond
        if math.isfinite(v) and v:
            exponents[math.frexp(v)[1] - 1] += 1
    return {name: found[name] for name in FIELDS}, exponents


def told(counts: Counts) -> tuple[dict[str, int], dict[int, int]]:
    return {name: getattr(counts, name) for name in FIELDS}, counts.exponents


def strange(rows: int, columns: int) -> Tensor:
    """Numbers of all magnitudes, some of them zero, infinite, NaN, or values of narrow formats."""
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-25, 20, (rows, columns)))
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.5])
    return x


@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e4m0", "int8", "bf16", "e8m0"])
def test_counts_are_those_of_a_direct_computation(device: torch.device, name: str, overflow: str) -> None:
    spec = Quantizer(name, "stochastic" if name != "e8m0" else "nearest", overflow=overflow)
    layer = qsim.nn.Quantize(forward=spec).to(device)
    x = strange(16, 33).to(device)
    with Monitor(layer) as monitor:
        torch.manual_seed(3)
        rounded = layer(x)
        monitor.step()
    (counts,) = monitor.samples[0].points
    assert (counts.layer, counts.point, monitor.samples[0].step) == ("", "forward", 0)
    assert told(counts) == direct(x, rounded, spec.format)
    assert (counts.zero, counts.nan, counts.infinite) == (2, 1, 2)
    if spec.format.has_zero:
        assert counts.exact >= 2  # zeros are
    x64, q64 = x.double(), rounded.double()
    finite = x64.isfinite() & q64.isfinite()
    noise = (x64 - q64)[finite].square().sum()
    assert counts.sqnr == pytest.approx(float(10 * torch.log10(x64[finite].square().sum() / noise)), abs=1e-9)


def seen_by_hooks(model: nn.Module, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """The tensors at the points of linear layers: inputs, weights and upstream gradients."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, qsim.nn.Linear):
            found[name, "weight"] = found[name, "weight_bwd"] = module.weight.detach().clone()
            module.register_forward_hook(
                lambda _, args, __, name=name: found.update({(name, point): args[0].detach() for point in ("act", "act_bwd")})
            )
            module.register_full_backward_hook(lambda _, __, grads, name=name: found.update({(name, "grad"): grads[0].detach()}))
    model(x).square().sum().backward()
    return found


def test_every_point_of_a_layer(device: torch.device) -> None:
    nearest = FivePoint(act="e4m3", weight="e2m1", act_bwd="e5m2", weight_bwd="e4m0", grad="e3m2")
    model = net(nearest).to(device)
    x = (torch.randn(16, 32) * 30).to(device).requires_grad_()
    seen = seen_by_hooks(copy.deepcopy(model), x)
    with Monitor(model) as monitor:
        model(x).square().sum().backward()
        monitor.step()
    sample = monitor.samples[0]
    assert {(counts.layer, counts.point) for counts in sample.points} == set(seen)
    for (layer, point), value in seen.items():
        spec = getattr(nearest, point)
        assert told(sample[layer, point]) == direct(value, spec(value), spec.format)
        assert sample[layer, point].quantizer == short(spec, point)


def test_gradients_of_their_own_and_reused_operands() -> None:
    points = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2", grad_w=Quantizer("e2m1"))
    model = net(points)
    with Monitor(model) as monitor:
        model(torch.randn(4, 32)).sum().backward()
        monitor.step()
    assert [counts.point for counts in monitor.samples[0].points if counts.layer == "2"] == ["act", "weight", "grad", "grad_w"]


def matrices(x: Tensor, spec: Quantizer, dim: int) -> tuple[Tensor, Tensor]:
    """Elements divided by the scales of blocks along a dimension, and their rounded values, from qsim's codes."""
    along = qsim.scaling.PerBlock(32, dim=dim, format="e8m0", rule="floor")
    made = qsim.encode(x, spec.format, scale=along)
    elements = qsim.decode(made.codes, spec.format)
    wide = qsim.decode(made.scales, "e8m0", dtype=torch.float32).repeat_interleave(32, dim)
    return x / wide, elements


def test_blocks_are_counted_after_their_scales(device: torch.device) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), FivePoint(act="mxfp4", weight="mxfp8", grad="mxfp8")).to(device)
    x = (torch.randn(64, 64) * torch.exp2(torch.randint(-6, 6, (64, 1)))).to(device)
    with Monitor(model) as monitor:
        y = model(x.requires_grad_())
        y.square().sum().backward()
        monitor.step()
    sample = monitor.samples[0]
    cases = [("act", x.detach(), "e2m1"), ("weight", model[0].weight.detach(), "e4m3")]
    for point, value, name in cases:
        spec = Quantizer(name)
        divided, elements = matrices(value, spec, -1)
        assert told(sample["0", point]) == direct(divided, elements, spec.format)
        rounded = qsim.quantize(value, {"act": "mxfp4", "weight": "mxfp8"}[point])
        noise = (value.double() - rounded.double()).square().sum()
        assert sample["0", point].sqnr == pytest.approx(float(10 * torch.log10(value.double().square().sum() / noise)), abs=1e-6)
    assert sample["0", "act"].saturated > 0  # some do under the rule of OCP's formats
    # The gradient is scaled along the dimension over which each of its products sums: rounded twice.
    assert sample["0", "grad"].elements == 2 * y.numel()


def test_a_transform_comes_first() -> None:
    spec = Quantizer("e4m3", scale=qsim.scaling.PerTensor(), transform=qsim.transforms.Hadamard(16))
    model = qsim.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), FivePoint(act=spec, weight=spec))
    x = torch.randn(8, 64) ** 5
    with Monitor(model) as monitor:
        model(x)
        monitor.step()
    turned = spec.transform.wide(x)  # type: ignore[union-attr]
    scale = turned.abs().max().double() / 448
    divided = turned * (1 / scale.float())
    assert told(monitor.samples[0]["0", "act"]) == direct(divided, qsim.quantize(divided, "e4m3"), spec.format)


def test_attention_and_convolutions() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv1d(4, 16, 3, padding=1), nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.conv(x).mT
            return self.attention(tokens, tokens, tokens, need_weights=False)[0]  # type: ignore[no-any-return]

    model = qsim.convert(Model(), POINTS)
    with Monitor(model) as monitor:
        model(torch.randn(2, 4, 10)).sum().backward()
        monitor.step()
    sample = monitor.samples[0]
    assert sample["conv", "act"].elements == 2 * 4 * 10
    assert sample["conv", "grad"].elements == 2 * 16 * 10
    # Inputs of the projections, then queries, keys, weights, values.
    assert sample["attention", "act"].elements == 2 * 2 * 10 * 16 + 3 * 2 * 10 * 16 + 2 * 2 * 10 * 10
    assert sample["attention", "weight"].elements == 4 * 16 * 16
