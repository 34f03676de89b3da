"""Tests of `qsim.plot`: the format's numbers are drawn, on the given axes, with labels; and errors for bad input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import qsim
from qsim import Float, Stochastic, plot
from qsim.formats import E2M1, E4M3, FP16, Fixed, Format, Int, PowerOfTwo
from qsim.functional.expected import corners, expected, within_a_binade
from qsim.random import random_bits
from qsim.rounding import NAMED, Rounding, resolve

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    pyplot.close("all")  # figures of other tests
    yield
    pyplot.close("all")


def monitored() -> qsim.diagnostics.Monitor:
    model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(32, 2, bias=False)), qsim.FivePoint(act="e4m3", grad="e5m2", act_bwd=None))
    with qsim.diagnostics.Monitor(model) as monitor:
        model(2.0 ** torch.arange(-20, 12)).sum().backward()
        monitor.step()
    return monitor


CALLS: list[Callable[..., Any]] = [
    lambda **where: plot.number_line("e2m1", **where),
    lambda **where: plot.rounding("e2m1", "stochastic", **where),
    lambda **where: plot.error("e4m3", Stochastic(3), **where),
    lambda **where: plot.monitor(monitored(), "0", **where),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("call", CALLS)
def test_axes_are_labelled_and_a_given_one_is_used(call: Callable[..., Any]) -> None:
    with matplotlib.rc_context({"font.size": 31.0}):
        own = call()
        assert own.xaxis.label.get_fontsize() == 9.0, "the style of all figures"
        assert pyplot.get_fignums() == [own.figure.number]
        _, (given, other) = pyplot.subplots(1, 2)
        assert call(ax=given) is given
        assert given.xaxis.label.get_fontsize() == 31.0, "the user's own"
    assert not other.has_data()
    assert len(pyplot.get_fignums()) == 2
    for axes in (own, given):
        assert axes.get_xlabel()
        assert axes.get_ylabel() or not len(axes.get_yticks())
        assert axes.get_title(loc="left")
        assert axes.get_legend() is not None
        axes.figure.canvas.draw()
    assert matplotlib.rcParams["font.size"] != 9.0


def marked(axes: Any) -> dict[str, list[float]]:
    return {lines.get_label(): [segment[0][0] for segment in lines.get_segments()] for lines in axes.collections}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", [E2M1, E4M3, Fixed(5, 2), Int(4, signed=False), PowerOfTwo(3), Float(3, 2, subnormals=False)], ids=repr)
@pytest.mark.parametrize("log", [False, True])
def test_a_number_line_marks_every_value(fmt: Format, log: bool) -> None:
    axes = plot.number_line(fmt, log=log)
    found = marked(axes)
    assert sorted(v for part in found.values() for v in part) == sorted(fmt.values())
    assert all(0 < abs(v) < fmt.smallest_normal for v in found.get("subnormal", []))
    assert ("zero" in found) == fmt.has_zero
    assert axes.get_xscale() == ("symlog" if log else "linear")
    axes.figure.canvas.draw()


def test_subnormals_are_drawn_differently() -> None:
    assert marked(plot.number_line("e2m1"))["subnormal"] == [-0.5, 0.5]


def curve(axes: Any, label: str) -> tuple[list[float], list[float]]:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rounding", [name for name in NAMED if name != "stochastic"])
@pytest.mark.parametrize("fmt", [E2M1, Fixed(4, 1), Int(3, signed=False)], ids=repr)
def test_a_staircase_is_what_quantize_gives(fmt: Format, rounding: str) -> None:
    x, y = curve(plot.rounding(fmt, rounding), "rounded")
    assert y == qsim.quantize(torch.tensor(x, dtype=torch.float64), fmt, rounding=rounding).tolist()
    assert set(y) == set(fmt.values())
    # The straight line between two corners misses nothing.
    steps = [(a, b) for (a, b, fa, fb) in zip(x, x[1:], y, y[1:], strict=False) if fa != fb]
    assert all(b <= math.nextafter(a, math.inf) for a, b in steps)


def test_stochastic_rounding_is_drawn_as_its_mean() -> None:
    axes = plot.rounding("e2m1", "stochastic", limits=(-5.0, 5.0))
    x, y = curve(axes, "mean")
    assert max(abs(a - b) for a, b in zip(x, y, strict=True)) < 1e-8
    (band,) = axes.collections
    corners_of_band = band.get_paths()[0].vertices
    assert set(corners_of_band[:, 1]) >= {-6.0, -4.0, 0.0, 0.5, 6.0}


ROUNDINGS = [*NAMED.values(), Stochastic(1), Stochastic(2), Stochastic(4), Stochastic(1, correction=True), Stochastic(3, correction=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ROUNDINGS, ids=repr)
@pytest.mark.parametrize("fmt", [E2M1, Fixed(4, 1), Float(2, 1, subnormals=False), PowerOfTwo(3)], ids=repr)
def test_expected_values_are_means_over_all_random_bits(fmt: Format, how: Rounding) -> None:
    x = torch.linspace(-1.1 * fmt.max, 1.1 * fmt.max, 2000, dtype=torch.float64)
    x = torch.cat([x[x > 0] if not fmt.is_signed else x, torch.tensor(fmt.values(), dtype=torch.float64)])
    found = expected(x, fmt, how)
    if not isinstance(how, Stochastic):
        every = qsim.quantize(x, fmt, rounding=how)[None]
    elif how.bits is None:
        assert (found.mean - x.clamp(fmt.min, fmt.max)).abs().max() < 1e-8
        return
    else:
        # Enough draws that each number is combined with each of the few integers.
        many = 40 * 2**how.bits
        drawn = random_bits(many * len(x), how.bits, seed=1).view(many, -1)
        results = qsim.quantize(x.expand(many, -1).contiguous(), fmt, rounding=how, seed=1)
        every = torch.stack([_where(results, drawn == number) for number in range(2**how.bits)])
    torch.testing.assert_close(found.mean, every.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.deviation, (every - x).square().mean(0).sqrt(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.farthest, (every - x).abs().amax(0), rtol=0, atol=1e-12)


def _where(results: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """One chosen entry of each column."""
    assert chosen.any(0).all()
    return results.gather(0, chosen.int().argmax(0, keepdim=True))[0]


@pytest.mark.parametrize(("fmt", "how", "unit"), [(E4M3, "nearest", 2.0**-4), (FP16, "nearest", 2.0**-11), (FP16, "up", 2.0**-10)])
def test_errors_of_normal_numbers_are_the_unit_roundoff(fmt: Format, how: str, unit: float) -> None:
    axes = plot.error(fmt, how)
    (steps,) = axes.patches
    heights, edges, _ = steps.get_data()
    normal = (edges[:-1] >= fmt.smallest_normal) & (edges[1:] <= fmt.max)
    due = unit / (1 + unit) if how == "nearest" else unit
    assert normal.sum() > 10
    assert heights[normal] == pytest.approx(due, rel=1e-3)
    assert {text.get_text() for text in axes.texts} == {"smallest", "smallest normal", "largest"}
    assert heights[0] == (1.0 if how == "nearest" else pytest.approx(3.0, rel=1e-3)), "to zero; or a quarter to the smallest"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", [E4M3, Int(8), Float(3, 4, specials="none"), PowerOfTwo(4)], ids=repr)
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero", "stochastic"])
def test_no_number_is_worse_than_what_is_drawn(fmt: Format, rounding: str) -> None:
    axes = plot.error(fmt, rounding)
    heights, edges, _ = axes.patches[0].get_data()
    for height, low, high in zip(heights, edges, edges[1:], strict=False):
        x = low + (high - low) * torch.rand(5000, dtype=torch.float64)
        worst = (expected(x, fmt, resolve(rounding)).farthest / x).max().item()
        assert worst <= height * (1 + 1e-6)
        assert worst >= height * 0.9


def test_a_monitor_is_drawn() -> None:
    axes = plot.monitor(monitored(), "0", "act")
    heights = [patch.get_height() for container in axes.containers for patch in container]
    assert sum(heights) == pytest.approx(100.0)
    assert len([height for height in heights if height]) == 32
    assert "saturated 9.38 %, underflowed 34.38 %" in axes.get_title(loc="left")


def test_corners_and_binades() -> None:
    x = corners([0.0, 1.0], -1.0, 2.0)
    assert (x.min(), x.max()) == (-1, 2)
    assert {0.5, math.nextafter(0.5, 0), math.nextafter(0.5, 1)} <= set(x.tolist())
    x = within_a_binade(FP16)
    assert (x[0], x[-1] < 2) == (1, True)
    assert 1 + 2.0**-11 in x.tolist()


ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: plot.number_line("fp32"), ValueError, r"number_line: Float\(8, 23, .*\) has 32 bits, and a line shows .* at most 16"),
    (lambda: plot.number_line("e2m1", log=1), TypeError, r"number_line: log must be True or False, got 1"),  # type: ignore[arg-type]
    (lambda: plot.number_line("e4m33"), ValueError, r"unknown format 'e4m33'"),
    (lambda: plot.number_line("e2m1", ax=3), TypeError, r"number_line: ax must be a matplotlib Axes or None, got 3"),  # type: ignore[arg-type]
    (lambda: plot.number_line("mxfp4"), ValueError, r"number_line: 'mxfp4' has scales, .* the format of its elements, 'e2m1'"),
    (lambda: plot.rounding("mxfp4"), ValueError, r"rounding: 'mxfp4' has scales"),
    (lambda: plot.error("nvfp4"), ValueError, r"error: 'nvfp4' has scales"),
    (lambda: plot.rounding("e2m1", "nearset"), ValueError, r"unknown rounding 'nearset': did you mean 'nearest'\?"),
    (lambda: plot.rounding("e2m1", limits=(2, 1)), ValueError, r"rounding: limits must be finite, the lower one first, got \(2, 1\)"),
    (lambda: plot.rounding("e2m1", limits=3), TypeError, r"rounding: limits must be two numbers, got 3"),  # type: ignore[arg-type]
    (
        lambda: plot.rounding("fp16", limits=(0, 9)),
        ValueError,
        r"18561 values lie between 0 and 9; choose limits with at most 1024",
    ),
    (lambda: plot.rounding("fp32"), ValueError, r"has 32 bits: values\(\) lists formats of at most 20 bits"),
    (lambda: plot.monitor(3, "0"), TypeError, r"monitor: monitor must be a qsim.diagnostics.Monitor, got 3"),  # type: ignore[arg-type]
    (lambda: plot.monitor(monitored(), "1"), ValueError, r"the layer '1' was not sampled; sampled were '0'"),
    (lambda: plot.monitor(monitored(), "0", "weight"), ValueError, r"nothing was rounded at 'weight' .* points there are 'act', 'grad'"),
    (lambda: plot.monitor(monitored(), "0", step=7), ValueError, r"step 7 has no sample of the layer"),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS, ids=[words for *_, words in ERRORS])
def test_errors(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
    assert not pyplot.get_fignums(), "raised before anything is drawn"


@pytest.mark.parametrize("call", CALLS)
def test_without_matplotlib_it_is_named(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(ImportError, match=r"qsim\.plot needs matplotlib, which is not installed: pip install matplotlib"):
        call()
