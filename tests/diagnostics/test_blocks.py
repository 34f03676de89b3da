"""The statistics of blocks compared with those of single blocks, and places that are followed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import BlockCounts, Monitor
from support.watched import net


def direct(x: Tensor, quantizer: Quantizer) -> tuple[float, float]:
    """The largest magnitude and the relative squared error of elements that share all scales."""
    rounded = quantizer(x).double()
    signal = x.double().square().sum()
    return float(x.abs().max()), float((rounded - x.double()).square().sum() / signal) if signal > 0 else 0.0


def sampled(quantizer: Quantizer, x: Tensor, weight: Tensor) -> tuple[BlockCounts, BlockCounts]:
    model = qsim.convert(nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0])), FivePoint(act=quantizer, weight=quantizer))
    model[0].weight.data.copy_(weight)
    with Monitor(model, blocks=2) as monitor:
        model(x)
        monitor.step()
    return monitor.blocks["0", "act", 0], monitor.blocks["0", "weight", 0]


@pytest.mark.parametrize(
    ("scale", "tile"),
    [
        (qsim.scaling.PerBlock(16, format="e8m0", rule="floor"), (1, 16)),
        (qsim.scaling.PerTile(8, 16), (8, 16)),
        (qsim.scaling.PerRow(), (1, 40)),
        (qsim.scaling.PerTensor(), (24, 40)),
        (None, (1, 40)),
    ],
    ids=["block", "tile", "row", "tensor", "none"],
)
def test_blocks_are_counted_one_by_one(scale: qsim.scaling.Scaling | None, tile: tuple[int, int]) -> None:
    """The last block of a row is shorter."""
    quantizer = Quantizer("e4m3", scale=scale)
    x, weight = (torch.randn(24, 40) * torch.exp2(torch.randint(-16, 9, (24, 40))) for _ in range(2))
    x[3, :16] = 0
    for counts, tensor in zip(sampled(quantizer, x, weight), (x, weight), strict=True):
        height, width = tile
        assert counts.amax.shape == (1, -(-24 // height), -(-40 // width))
        for i, rows in enumerate(tensor.split(height)):
            for j, block in enumerate(rows.split(width, dim=1)):
                amax, error = direct(block, quantizer)
                assert counts.amax[0, i, j] == pytest.approx(amax)
                assert counts.error[0, i, j] == pytest.approx(error, rel=1e-4, abs=1e-7)
                # Under scales that are no powers of two, the largest element may be one unit in the last place beyond the range.
                one = 1 / block.numel() if scale is not None and scale.format.precision > 1 else 0.0
                elements = block / counts.scale[0, i, j]
                rounded = quantizer(block)
                assert counts.saturated[0, i, j] == pytest.approx(float((elements.abs() > 448 * (1 + 1e-6)).float().mean()), abs=1.01 * one)
                assert counts.underflowed[0, i, j] == pytest.approx(float(((block != 0) & (rounded == 0)).float().mean()), abs=1e-6)
        assert torch.equal(counts.channels, tensor.abs().amax(0))


def test_the_worst_block_and_outlier_channels() -> None:
    x = torch.ones(6, 64)
    x[4, 40] = 1000.0
    counts, _ = sampled(Quantizer("mxfp4"), x, torch.ones(4, 64))
    assert counts.worst("underflowed") == (0, 4, 1)
    assert counts.worst("amax") == (0, 4, 1)
    assert counts.outliers() == {40: 1000.0}
    assert counts.outliers(times=2000.0) == {}
    with pytest.raises(ValueError, match=r"blocks have 'amax', 'scale', 'saturated', 'underflowed', 'error', not 'noise'"):
        counts.worst("noise")  # type: ignore[arg-type]


def test_channels_of_images_and_blocks_along_them() -> None:
    model = qsim.convert(nn.Sequential(nn.Conv2d(40, 8, 3)), FivePoint(act="mxfp4"))
    x = torch.randn(2, 40, 5, 5)
    x[:, 7] *= 100
    with Monitor(model, blocks=1) as monitor:
        model(x)
        monitor.step()
    counts = monitor.blocks["0", "act", 0]
    assert counts.amax.shape == (2 * 2, 5, 5)
    assert torch.equal(counts.amax[2], x[1, :32].abs().amax(0))
    assert list(counts.outliers()) == [7]


def test_experts_have_statistics_of_their_own() -> None:
    """The rows of a grouped product belong to experts, and so does each matrix of its stack."""
    points = FivePoint(act="e4m3", weight=Quantizer("e4m3", scale=qsim.scaling.PerBlock(16)))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, 32, 16, dtype=torch.bfloat16))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return torch.nn.functional.grouped_mm(x, self.stack, offs=ends)

    model = qsim.convert(Experts(), points)
    x = torch.randn(12, 32, dtype=torch.bfloat16)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    with Monitor(model, blocks=2) as monitor:
        model(x, ends)
        monitor.step()
    act, weight = (monitor.blocks["stack", point, 0] for point in ("act", "weight"))
    assert act.amax.flatten().tolist() == [float(x[:4].abs().max()), 0.0, float(x[4:].abs().max())]
    assert weight.amax.shape == (3, 2, 16)
    assert torch.allclose(weight.amax[1, 1], model.stack[1, 16:].detach().abs().amax(0).float())


def test_the_worst_places_are_followed() -> None:
    torch.manual_seed(0)
    model = net()
    with Monitor(model, every=2, blocks=3) as monitor:
        for _ in range(6):
            model(torch.randn(16, 32)).square().mean().backward()
            monitor.step()
    assert [sample.step for sample in monitor.samples] == [0, 2, 4]
    for before, step in zip(monitor.samples, (2, 4), strict=False):
        worst = {(counts.layer, counts.point) for counts in before.worst("sqnr")[:3]}
        assert {(counts.layer, counts.point) for counts in monitor.blocks.filter(step=step)} == worst
    assert len(monitor.blocks.filter(step=0)) == 3


def test_chosen_places_have_histories() -> None:
    model = net("mxfp4")
    with Monitor(model, every=1, blocks=[("0", "act")]) as monitor:
        for step in range(4):
            model(2.0**step * torch.ones(4, 32)).sum().backward()
            monitor.step()
    found = monitor.blocks
    assert [counts.step for counts in found] == [0, 1, 2, 3]
    assert [float(counts.scale.max()) for counts in found] == [2.0 ** (step - 2) for step in range(4)]
    assert found.plot("scale").get_ylabel() == "scale"
    assert found[0].heat_map("amax").get_ylabel() == "row of blocks"
    assert [row["scale_max"] for row in found.rows()] == [0.25, 0.5, 1.0, 2.0]
    assert json.loads(found.to_json())["blocks"][0]["amax"] == [[[1.0]] * 4]


@pytest.mark.parametrize("blocks", [0, 100])
def test_counts_and_training_do_not_depend_on_blocks(blocks: int) -> None:
    def run(blocks: int) -> tuple[list[Tensor], list[dict[str, object]]]:
        torch.manual_seed(1)
        model = net()
        with Monitor(model, blocks=blocks) as monitor:
            model(torch.randn(16, 32)).square().mean().backward()
            monitor.step()
        return [own.grad for own in model.parameters() if own.grad is not None], monitor.summary()

    gradients, counts = run(blocks)
    others, other = run(0)
    assert all(torch.equal(one, two) for one, two in zip(gradients, others, strict=True))
    assert json.dumps(counts) == json.dumps(other)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [(-1, "0 or more places"), ("0", "a number of places"), ([("9", "act")], "there is no layer '9'"), (True, "a number of places")],
)
def test_errors(blocks: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Monitor(net(), blocks=blocks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no blocks have been sampled"):
        qsim.diagnostics.BlockSamples(()).plot()
