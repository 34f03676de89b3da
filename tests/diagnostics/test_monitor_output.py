"""Output of the monitor: writers, JSON lines, tables, figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.diagnostics import Monitor
from support.watched import net


class Writer:
    """A stand-in that records what a TensorBoard writer would get."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


class RawWriter(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.histograms: dict[tuple[str, int], dict[str, Any]] = {}

    def add_histogram_raw(self, tag: str, *, global_step: int, **facts: Any) -> None:
        self.histograms[tag, global_step] = facts


class ValuesWriter(Writer):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[str, int], Tensor] = {}

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        self.values[tag, global_step] = values


def sampled(**options: Any) -> tuple[nn.Module, Monitor]:
    model = net()
    monitor = Monitor(model, every=2, **options)
    for _ in range(3):
        model(torch.randn(16, 32)).square().sum().backward()
        monitor.step()
    monitor.close()
    return model, monitor


@pytest.mark.parametrize("kind", [Writer, RawWriter, ValuesWriter])
def test_writers_get_every_sample_once(kind: type[Any]) -> None:
    writer = kind()
    _, monitor = sampled(writer=writer, per_layer=True)
    counts = monitor.samples[1]["2", "grad"]
    assert writer.scalars["2/grad/underflowed", 2] == counts.shares["underflowed"]
    assert writer.scalars["2/grad/sqnr", 2] == counts.sqnr
    assert {step for _, step in writer.scalars} == {0, 2}
    if kind is RawWriter:
        facts = writer.histograms["2/grad/exponents", 2]
        assert facts["num"] == sum(facts["bucket_counts"]) == counts.elements - counts.zero
        assert dict(zip([limit - 1 for limit in facts["bucket_limits"]], facts["bucket_counts"], strict=True)) == {
            exponent: counts.exponents.get(exponent, 0) for exponent in range(counts.lowest, counts.lowest + len(counts.histogram))
        }
    if kind is ValuesWriter:
        assert Counter(writer.values["2/grad/exponents", 2].tolist()) == counts.exponents


def test_writers_get_aggregates_of_all_layers_by_default() -> None:
    writer = RawWriter()
    _, monitor = sampled(writer=writer)
    points = [counts for counts in monitor.samples[1] if counts.point == "grad"]
    assert len(points) == 2
    elements = sum(counts.elements for counts in points)
    assert writer.scalars["all layers/grad/exact", 2] == sum(counts.exact for counts in points) / elements
    assert writer.scalars["worst layer/grad/underflowed", 2] == max(counts.shares["underflowed"] for counts in points)
    assert writer.scalars["worst layer/grad/sqnr", 2] == min(counts.sqnr for counts in points)
    assert writer.histograms["all layers/grad/exponents", 2]["num"] == elements - sum(counts.zero for counts in points)
    assert {tag.split("/")[0] for tag, _ in writer.scalars} == {"all layers", "worst layer"}
    assert len([tag for tag, step in writer.scalars if step == 2]) <= 5 * 9, "independent of the number of layers"
    assert len([tag for tag, step in writer.histograms if step == 2]) == 5
    with pytest.raises(TypeError, match="Monitor: per_layer must be True or False, got 1"):
        Monitor(net(), per_layer=1)  # type: ignore[arg-type]


def test_lines_of_json_and_plain_dictionaries(tmp_path: Path) -> None:
    _, monitor = sampled()
    path = tmp_path / "samples.jsonl"
    for _ in range(2):
        monitor.write(str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]
    assert [line["step"] for line in lines] == [0, 2]
    first, counts = lines[1]["points"][0], monitor.samples[1][0]
    assert (first["layer"], first["point"], first["elements"]) == ("0", "act", 16 * 32)
    assert {int(exponent): count for exponent, count in first["exponents"].items()} == counts.exponents
    assert sum(first["exponents"].values()) == 16 * 32
    summary = monitor.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    counts = monitor.samples[0][0]
    facts = {"step": 0, "layer": "0", "point": "act", "elements": 512, **counts.shares, "zero": counts.zero / 512}
    assert {name: value for name, value in summary[0].items() if name != "sqnr"} == facts
    assert 20 < summary[0]["sqnr"] < 40


def test_tables() -> None:
    _, monitor = sampled()
    table = str(monitor).splitlines()
    # The input requires no gradient, so the first layer does not round a weight for the backward pass.
    assert (table[0], len(table)) == ("step 2", 2 + 9)
    assert table[1].split() == ["layer", "point", "quantizer", "elements", "saturated", "underflowed", "exact", "zero", "NaN", "SQNR"]
    assert monitor.table(0).startswith("step 0\n")
    with pytest.raises(ValueError, match=r"step 1 was not sampled; sampled were 0, 2"):
        monitor.table(1)
    with Monitor(net()) as empty:
        assert str(empty).startswith("no sample yet: a sample ends with its step, at monitor.step()")
    with pytest.raises(KeyError, match="no point 'grad_w' at '0': there are 'act', 'weight', "):
        monitor.samples[0]["0", "grad_w"]
    last = monitor.samples[-1]
    ordered = [counts.sqnr for counts in last.worst("sqnr")]
    assert ordered == sorted(ordered)
    lost = [counts.underflowed / counts.elements for counts in last.worst("underflowed")]
    assert lost == sorted(lost, reverse=True) != sorted(lost)
    first = last.worst("sqnr")[0]
    assert monitor.table(by="sqnr", rows=1).splitlines()[2].split()[:2] == [first.layer, first.point]
    assert len(monitor.table(rows=3).splitlines()) == 2 + 3
    with pytest.raises(ValueError, match="by: must be one of sqnr, saturated, underflowed, exact, nan; got 'worst'"):
        monitor.table(by="worst")
    with pytest.raises(TypeError, match="Sample: a key is layer and point, an index or a slice, got '0'"):
        monitor.samples[0]["0"]  # type: ignore[index]
    with pytest.raises(KeyError, match="no layer 'head': there are '0', '2'"):
        monitor.samples[0]["head", "act"]


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, monitor = sampled()
    exponents, shares = monitor.plot_exponents("2"), monitor.plot_shares("2")
    for name, figure in (("exponents", exponents), ("shares", shares)):
        figure.savefig(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size > 5000
    assert len(exponents.axes) == 5
    heights = sum(patch.get_height() for container in exponents.axes[0].containers for patch in container)
    assert heights == pytest.approx(100.0)
    assert [axes.get_ylabel() for axes in shares.axes][2] == "SQNR (dB)"
    assert [len(axes.lines) for axes in shares.axes] == [5, 5, 5]
    with pytest.raises(ValueError, match="the layer '1' was not sampled; sampled were '0', '2'"):
        monitor.plot_shares("1")
    with Monitor(net()) as fresh, pytest.raises(ValueError, match="no sample yet: a sample ends with its step"):
        fresh.plot_exponents("0")
    with pytest.raises(ValueError, match="step 1 has no sample of the layer '2'; sampled were 0, 2"):
        monitor.plot_exponents("2", 1)


def test_layers_that_never_run_are_named() -> None:
    class Reads(nn.Module):
        """Reads the weight of a layer without multiplying by it."""

        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = net(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.called(x) + self.read.weight.sum()

    model = qsim.convert(Reads(), "fp8_hybrid")
    with Monitor(model) as monitor:
        model(torch.randn(4, 32)).sum().backward()
        monitor.step()
    sample = monitor.samples[0]
    assert sample.never_called == ("read",)
    assert str(monitor).splitlines()[-1] == "never called in this step, or only in compiled code: read"
    assert monitor.summary()[-1] == {
        "step": 0,
        "layer": "read",
        "point": None,
        "elements": 0,
        "note": "never called in this step, or only in compiled code",
    }
    assert sample.to_dict()["never_called"] == ["read"]
    assert "never_called" not in sampled()[1].samples[0].to_dict()
    qsim.convert(model, qsim.FivePoint(), include="read")
    with Monitor(model) as monitor:
        model(torch.randn(4, 32)).sum().backward()
        monitor.step()
    assert monitor.samples[0].never_called == ()


def test_a_writer_has_add_scalar() -> None:
    class Logs:
        def log(self, numbers: object) -> None: ...

    model = qsim.convert(nn.Sequential(nn.Linear(4, 4)), "mxfp8")
    for writer in (Logs(), "runs/1"):
        with pytest.raises(TypeError, match=r"^Monitor: writer must have add_scalar, as TensorBoard's SummaryWriter has, got "):
            qsim.diagnostics.Monitor(model, writer=writer)  # type: ignore[arg-type]
    qsim.diagnostics.Monitor(model).close()  # nothing was left on the model
