"""The type of results: a sequence that looks up, filters, ranks, groups blocks, prints, and goes to JSON, pandas and TensorBoard."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import qsim
from qsim.diagnostics import Estimate, GradientError
from qsim.diagnostics.gradients.errors import GradientErrors
from qsim.text.records import Records, Values, plain
from qsim.text.tables import Quantity, Table
from support.watched import net

BELOW = Estimate(1.0, 0.5, math.inf)


@dataclass(frozen=True)
class Loss:
    layer: str
    share: float
    elements: int
    gradient: Estimate = BELOW


@dataclass(frozen=True)
class Losses(Records[Loss]):
    step: int = 3
    notes: tuple[str, ...] = ()

    COLUMNS: ClassVar[Values] = {"layer": "layer", "lost": "share", "elements": lambda loss: f"{loss.elements:,}"}
    RIGHT: ClassVar[tuple[str, ...]] = ("lost", "elements")
    KEY: ClassVar[tuple[str, ...]] = ("layer",)
    LOSSES: ClassVar[Values] = {"share": "share"}


FOUND = Losses((Loss("blocks.0.up", 0.25, 1000), Loss("blocks.1.up", 0.25, 1000), Loss("head", math.nan, 10), Loss("first", 0.5, 10)))


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag] = scalar_value


def test_it_is_a_sequence() -> None:
    assert isinstance(FOUND, Sequence)
    assert (len(FOUND), FOUND[0], FOUND[-1], bool(Losses(()))) == (4, FOUND.records[0], FOUND.records[3], False)
    assert FOUND[1:3] == Losses(FOUND.records[1:3])
    assert [loss.layer for loss in FOUND] == ["blocks.0.up", "blocks.1.up", "head", "first"]
    assert FOUND["head",] is FOUND.records[2]
    assert FOUND.index(FOUND[1]) == 1


def test_a_table_has_shares_and_numbers_at_the_right() -> None:
    assert str(FOUND).splitlines() == [
        "layer           lost  elements",
        "blocks.0.up  25.00 %     1,000",
        "blocks.1.up  25.00 %     1,000",
        "head               -        10",
        "first        50.00 %        10",
    ]
    assert [line.split()[0] for line in FOUND.table(by="share", rows=2).splitlines()] == ["layer", "first", "blocks.0.up"]


def test_the_worst_come_first_and_nan_last() -> None:
    assert [loss.layer for loss in FOUND.worst("share")] == ["first", "blocks.0.up", "blocks.1.up", "head"]
    with pytest.raises(ValueError, match="by: must be one of share; got 'elements'"):
        FOUND.worst("elements")


def test_filters_keep_the_kind_and_its_facts() -> None:
    assert FOUND.filter(elements=10, layer="head") == Losses(FOUND.records[2:3])
    assert FOUND.filter(lambda loss: loss.share > 0.3) == Losses(FOUND.records[3:])


def test_repeated_blocks_share_a_record() -> None:
    assert FOUND.by_block() == [(Loss("blocks.*.up", 0.25, 1000), 2), (FOUND[2], 1), (FOUND[3], 1)]
    uneven = Losses((Loss("blocks.0.up", 0.25, 1000), Loss("blocks.1.up", 0.5, 1000)))
    assert uneven.by_block() == [(uneven[0], 1), (uneven[1], 1)]


def test_plain_values() -> None:
    row = {"step": 3, "layer": "head", "share": None, "elements": 10, "gradient": 1.0, "gradient_low": 0.5, "gradient_high": None}
    assert FOUND.rows()[2] == row
    everything = json.loads(Losses(FOUND.records, notes=("a", "b")).to_json())
    assert (everything["step"], everything["notes"], len(everything["records"])) == (3, ["a", "b"], 4)
    assert "notes" not in FOUND.to_dict()
    assert plain({"shape": (2, 3), "where": [math.nan]}) == {"shape": [2, 3], "where": [None]}


def test_pandas_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame(list[dict[str, Any]]):
        DataFrame: Any = list

    monkeypatch.setitem(sys.modules, "pandas", Frame())  # type: ignore[arg-type]
    assert FOUND.to_pandas() == FOUND.rows()
    monkeypatch.setitem(sys.modules, "pandas", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        FOUND.to_pandas()


def test_a_key_that_does_not_exist() -> None:
    with pytest.raises(KeyError, match=r"no layer 'tail': there are 'blocks\.0\.up', 'blocks\.1\.up', 'head', 'first'"):
        FOUND["tail",]
    errors = GradientErrors(
        tuple(GradientError(*place, *[Estimate(2.0, 1.0, 3.0)] * 4) for place in (("0", "grad"), ("1", "act"))), 3, 2, 0.9
    )
    with pytest.raises(KeyError, match=r"no point 'weight' at '0': there are 'grad'\"$"):
        errors["0", "weight"]
    with pytest.raises(KeyError, match="no layer 'tail': there are none"):
        Losses(())["tail",]
    with pytest.raises(TypeError, match="Losses: a key is layer, an index or a slice, got 'head'"):
        FOUND["head"]  # type: ignore[call-overload]


def test_writers_get_aggregates_and_details_on_request() -> None:
    each = tuple(GradientError(layer, "grad", *[Estimate(2.0, 1.0, 3.0)] * 4) for layer in ("0", "all weights"))
    errors = GradientErrors(each, 3, 2, 0.9)
    few, many = Writer(), Writer()
    errors.log(few, 0)
    errors.log(many, 0, details=True)
    assert few.scalars["all weights/grad/bias"] == 2.0
    assert set(few.scalars) == {f"all weights/grad/{name}" for name in ("bias", "sampling", "rounding", "gradient")}
    assert {tag.rpartition("/")[0] for tag in many.scalars} == {"0/grad", "all weights/grad"}


def results() -> Iterator[Records[Any]]:
    model = net()
    with qsim.diagnostics.Monitor(model) as monitor:
        model(torch.randn(16, 32)).square().sum().backward()
        monitor.step()
    yield monitor.samples[0]
    yield monitor.advice()
    yield qsim.coverage(model, torch.randn(16, 32))
    yield qsim.nn.conversion(model)
    batches = list(torch.randn(4, 16, 32))
    yield qsim.diagnostics.gradient_error(model, lambda model, x: model(x).square().mean(), batches, 2)
    optimizer = qsim.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, update="nearest")
    with qsim.diagnostics.cancelled_updates(optimizer) as cancelled:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    yield cancelled.updates


def test_every_result_prints_and_goes_to_json_and_to_writers() -> None:
    for found in results():
        assert isinstance(found, Records)
        assert str(found) == found.table()
        assert json.loads(found.to_json()) == found.to_dict()
        assert all(isinstance(value, (str, int, float, list, dict, type(None))) for row in found.rows() for value in row.values())
        writer = Writer()
        found.log(writer, 0)
        assert len(writer.scalars) <= 60
        assert all(map(math.isfinite, writer.scalars.values()))
        for by in found.LOSSES:
            assert len(found.worst(by)) == len(found)
            assert found.table(by, rows=1)


def test_a_plot_of_what_is_worst() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = qsim.plot.worst(FOUND, "share", rows=2)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "blocks.0.up"]
    assert [bar.get_width() for bar in axes.patches] == [0.5, 0.25]
    assert axes.get_xlabel() == "share"
    pytest.importorskip("matplotlib.pyplot").close("all")
    with pytest.raises(TypeError, match="worst: records must be a result of qsim, such as a Sample or a Coverage, got 3"):
        qsim.plot.worst(3, "share")  # type: ignore[arg-type]


SPEEDS = Table(
    ({"work": "a|b", "seconds": 0.0021, "peak": None}, {"work": "much", "note": "refused"}, {"work": "c", "seconds": 0.5, "peak": 7}),
    {"work": "work", "ms": Quantity("seconds", 1, 1e3), "peak": Quantity("peak", missing="unknown")},
    "Speed",
)


def test_rows_of_plain_values_are_records() -> None:
    assert str(SPEEDS).splitlines() == ["work     ms     peak", "a|b     2.1  unknown", "much  refused", "c     500.0        7"]
    assert SPEEDS["c",] is SPEEDS[2]
    assert [row["work"] for row in SPEEDS.worst("seconds")] == ["c", "a|b", "much"]
    assert SPEEDS.filter(peak=7) == SPEEDS[2:]
    assert json.loads(SPEEDS[:1].to_json(indent=2)) == {"heading": "Speed", "rows": [{"work": "a|b", "seconds": 0.0021, "peak": None}]}
    assert SPEEDS.rows() == [*SPEEDS.records]
    writer = Writer()
    SPEEDS.log(writer, 1, details=True)
    assert writer.scalars == {"a|b/seconds": 0.0021, "c/seconds": 0.5, "c/peak": 7}


def test_records_print_as_markdown() -> None:
    assert SPEEDS.markdown(by="seconds").splitlines() == [
        "| work | ms | peak |",
        "| --- | --- | --- |",
        "| c | 500.0 | 7 |",
        "| a\\|b | 2.1 | unknown |",
        "| much | refused |  |",
    ]
    assert FOUND.markdown(by="share", rows=1).splitlines()[2:] == ["| first | 50.00 % | 10 |"]


def test_a_table_of_texts_has_columns_with_titles_of_their_own() -> None:
    table = Table.of("Losses", ["format", "loss"], [["e4m3", "0.31"]])
    assert (table.heading, table[0]) == ("Losses", {"format": "e4m3", "loss": "0.31"})
    with pytest.raises(ValueError, match="Table: each column needs a title of its own, got loss, loss"):
        Table.of("Losses", ["loss", "loss"], [])
    with pytest.raises(ValueError, match="shorter"):
        Table.of("Losses", ["format", "loss"], [["e4m3"]])
