"""Sweeps over a caller's own model: the grid, stored results, verdicts, problems, forms of data, errors, and the command line."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import qsim
from qsim import FivePoint, studies
from qsim.cli import main
from qsim.cli.sweep import _configured
from qsim.studies.result import Result
from qsim.studies.statistics import difference
from qsim.studies.study import Run
from qsim.studies.sweeps.repeat import configuration, write_configuration
from qsim.studies.sweeps.results import Settings, Sweep
from qsim.studies.sweeps.sources import Sources

torch.manual_seed(0)
X = torch.randn(96, 6)
Y = (X[:, 0] > 0).long()
DATA = (X[:64], Y[:64], X[64:], Y[64:])
MADE = nn.Linear(6, 2)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def data() -> tuple[Tensor, ...]:
    return DATA


class Pairs(Dataset[Any]):
    """A data set that is not made of tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Lazy(Dataset[Any]):
    """A data set that reads from a file of another library, which cannot be pickled."""

    def __init__(self) -> None:
        self.file = open(__file__)  # noqa: SIM115

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def closure(shift: float) -> Any:
    """Data behind a function whose source does not say which."""
    return lambda: (X[:64] + shift, Y[:64], X[64:], Y[64:])


def layers(width: int) -> Any:
    """Models behind a function whose source does not say how wide."""
    return lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))


def wide(width: int) -> nn.Module:
    return nn.Linear(6, width)


def momentum(value: float) -> Any:
    """Optimizers that differ in a default argument."""
    return lambda parameters, rate, momentum=value: torch.optim.SGD(parameters, rate, momentum)


def callable_point(by: float) -> FivePoint:
    return FivePoint(act=lambda x: x * by, act_bwd=None)


def halved(pairs: list[Any]) -> Any:
    """A collation that changes the inputs."""
    x, y = zip(*pairs, strict=True)
    return torch.stack(x) / 2, torch.stack(y)


pytestmark = pytest.mark.usefixtures("blank_figures")

SETTINGS = Settings(("P",), (8,), (1e-2,), 2, 2, 0.01)
PAIRS = (Pairs(*DATA[:2]), Pairs(*DATA[2:]))


def swept(folder: Path, **options: Any) -> studies.Sweep:
    chosen: dict[str, Any] = {"points": ["mxfp4"], "batches": [8, 32], "steps": 6, "seeds": 2, "rates": [1e-2], "folder": folder}
    return studies.sweep(options.pop("make_model", make), options.pop("data", DATA), nn.functional.cross_entropy, **(chosen | options))


def lines(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text().splitlines()


def test_differences_are_those_of_models_trained_by_hand(tmp_path: Path) -> None:
    result = swept(tmp_path)

    def loss(points: str | None, batch: int, seed: int) -> float:
        torch.manual_seed(seed)
        model = make()
        if points:
            qsim.convert(model, points)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        order = torch.Generator().manual_seed(seed)
        for _ in range(6):
            chosen = torch.randint(64, (batch,), generator=order)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[:64][chosen]), Y[:64][chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            return nn.functional.cross_entropy(model.eval()(X[64:]), Y[64:]).item()

    for batch in (8, 32):
        rounded, full = ([loss(points, batch, seed) for seed in (0, 1)] for points in ("mxfp4", None))
        assert result.added("mxfp4", batch) == pytest.approx(difference(rounded, full), nan_ok=True)
        assert result.losses("mxfp4", batch, 1e-2) == pytest.approx(rounded)
    assert result.settings.labels == ("full precision", "mxfp4")
    assert {row["points"] for row in result.rows()} == {"full precision", "mxfp4"}
    assert len(result.rows()) == 8


def test_frames(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    result = swept(tmp_path, batches=[8])
    assert result.frame().equals(pandas.DataFrame(result.rows()))
    assert result.frame().groupby("points").test_loss.count().to_dict() == {"full precision": 2, "mxfp4": 2}


def test_a_larger_grid_measures_what_is_new(tmp_path: Path) -> None:
    swept(tmp_path)
    before = lines(tmp_path)
    swept(tmp_path, batches=[8, 16, 32], seeds=3)
    assert lines(tmp_path)[: len(before)] == before
    assert len(lines(tmp_path)) == 2 * 3 * 3


def test_results_of_other_points_models_and_data_are_not_used(tmp_path: Path) -> None:
    swept(tmp_path, points={"P": FivePoint(act="e4m3", act_bwd=None)}, batches=[8])
    assert len(lines(tmp_path)) == 4
    swept(tmp_path, points={"P": FivePoint(act="e5m2", act_bwd=None)}, batches=[8])
    assert len(lines(tmp_path)) == 6  # full precision is the same

    def other() -> nn.Module:
        return nn.Linear(6, 2)

    swept(tmp_path, points={"P": FivePoint(act="e5m2", act_bwd=None)}, batches=[8], make_model=other)
    assert len(lines(tmp_path)) == 10
    swept(tmp_path, points={"P": FivePoint(act="e5m2", act_bwd=None)}, batches=[8], data=(*DATA[:3], 1 - DATA[3]))
    assert len(lines(tmp_path)) == 14


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"data": PAIRS}, {"data": (Pairs(X[:64], 1 - Y[:64]), PAIRS[1])}),
        ({"data": closure(0.0)}, {"data": closure(1.0)}),
        ({"make_model": layers(4)}, {"make_model": layers(8)}),
        ({"make_model": functools.partial(wide, 4)}, {"make_model": functools.partial(wide, 8)}),
        ({"make_optimizer": momentum(0.0)}, {"make_optimizer": momentum(0.9)}),
        ({"points": {"P": callable_point(2.0)}}, {"points": {"P": callable_point(1.0)}}),
        ({"data": PAIRS}, {"data": (DataLoader(PAIRS[0], collate_fn=halved), PAIRS[1])}),
    ],
    ids=["datasets", "data of closures", "models of closures", "partials", "optimizers", "callable points", "collation"],
)
def test_results_of_other_contents_are_not_used(tmp_path: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    options = {"points": {"P": None}, "batches": [8], "steps": 2, "seeds": 1}
    results = [swept(tmp_path, **(options | chosen)) for chosen in (first, second, first)]
    assert len({json.loads(line)["run"]["label"] + line for line in lines(tmp_path)}) == len(lines(tmp_path))
    losses = [result.losses("P", 8, 1e-2) for result in results]
    assert losses[0] == losses[2] != losses[1]


def test_data_that_cannot_be_identified_needs_a_key(tmp_path: Path) -> None:
    options = {"points": {"FP32": None}, "batches": [8], "steps": 1, "seeds": 1, "data": (Lazy(), Lazy())}
    error = "sweep: data[0].file is a _io.TextIOWrapper, which cannot be told from another one, so results of other data could be reused"
    with pytest.raises(TypeError, match=re.escape(error)):
        swept(tmp_path, **options)
    assert not list(tmp_path.iterdir())
    for key, count in (("first", 1), ("first", 1), ("second", 2)):
        swept(tmp_path, **options, data_key=key)
        assert len(lines(tmp_path)) == count


def test_every_form_of_data_gives_the_same_losses(tmp_path: Path) -> None:
    train, test = (TensorDataset(*DATA[:2]), TensorDataset(*DATA[2:]))
    forms = [DATA, data, (train, test), (DataLoader(train, 3), DataLoader(test, 5)), (Pairs(*DATA[:2]), Pairs(*DATA[2:]))]
    results = [swept(tmp_path / str(place), data=form, batches=[8], seeds=1) for place, form in enumerate(forms)]
    losses = [[row["test_loss"] for row in result.rows()] for result in results]
    assert all(each == pytest.approx(losses[0]) for each in losses)


def test_the_report_names_underflow(tmp_path: Path) -> None:
    """Gradients of a mean loss that is divided by a million are below E4M0's range, in every layer."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) / 1e6

    studies.sweep(make, DATA, loss, points={"E4M0": FivePoint(grad="e4m0")}, batches=[8], steps=2, seeds=2, folder=tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "## Problems in the last step of the first seed" in page
    assert "grad: 100 % underflow" in page
    assert '{"grad"' in page  # the points themselves


def test_verdicts(tmp_path: Path) -> None:
    """Points that round nothing that matters train as well; points whose gradients vanish do not."""
    points = {
        "FP32": None,
        "BF16": FivePoint(weight="fp32", weight_bwd=None),
        "nothing": FivePoint(grad=qsim.Quantizer("e4m0", overflow="saturate")),
    }
    result = swept(tmp_path, points=points, batches=[32], steps=40, seeds=3, tolerance=0.05, rates=[1e-2, 1e-3])
    verdicts = {claim.paper: claim.verdict for claim in result.report.claims}
    assert result.reference == "FP32"
    assert verdicts["BF16 trains as well as FP32"] == "yes"
    assert result.added("BF16", 32).value == 0.0
    assert result.rate("FP32", 32) == 1e-2


@pytest.mark.parametrize(("added", "verdict"), [({8: 1.0, 32: 0.1}, "yes"), ({8: 0.1, 32: 1.0}, "no")])
def test_a_gap_closes_if_less_is_added_at_the_larger_batch(
    added: dict[int, float], verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = swept(tmp_path, steps=2, seeds=3)
    losses = {label: (lambda batch, is_own=label == "mxfp4": added[batch] * is_own) for label in result.settings.labels}
    monkeypatch.setattr(result, "best", lambda label, batch, design="": [2.0 + losses[label](batch) + seed for seed in range(3)])
    assert result._closes("mxfp4", "steps").verdict == verdict


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batches": []}, "sweep: batches must be positive, got []"),
        ({"batches": [0, 8]}, "sweep: batches must be positive, got [0, 8]"),
        ({"steps": 0}, "sweep: steps must be positive, got 0"),
        ({"rates": [-1.0]}, "sweep: rates must be positive, got [-1.0]"),
        ({"seeds": 0}, "sweep: seeds must be positive, got 0"),
        ({"tolerance": -0.1}, "sweep: tolerance must be a share of the loss, 0 or more, got -0.1"),
        ({"batches": [8.0]}, "sweep: batches must be integers, got [8.0]"),
        ({"steps": 2.5}, "sweep: steps must be an integer, got 2.5"),
        ({"rates": [float("nan")]}, "sweep: rates must be positive, got [nan]"),
        ({"data": (X[:0], Y[:0], X, Y)}, "sweep: data must have training examples, got none"),
        ({"data": (X, Y, X[:0], Y[:0])}, "sweep: data must have test examples, got none"),
        ({"make_model": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(6))}, "sweep: mxfp4 rounds nothing in this model"),
        ({"designs": ["images"]}, "sweep: designs must be of steps, examples, got ['images']"),
        ({"make_model": nn.Linear(6, 2).weight}, "sweep: make_model must be a function, got Parameter"),
        ({"points": ["mxfp8", "mxfp99"]}, "unknown recipe 'mxfp99': there are fp8_hybrid, "),
        ({"data": X}, "sweep: data must be four tensors"),
        ({"data": DATA[:3]}, "sweep: data must be four tensors"),
        ({"data": DATA[:2]}, "sweep: data has no test examples; pass four tensors"),
        ({"data": (X, Y[:9], X, Y)}, "sweep: data must have one target per input, got 96 training inputs and 9 targets"),
        ({"data": (X, Y, X, Y[:9])}, "sweep: data must have one target per input, got 96 test inputs and 9 targets"),
        ({"make_model": lambda: MADE}, "sweep: make_model returned parameters that it had returned before"),
        ({"make_model": lambda: nn.Sequential(MADE)}, "sweep: make_model returned parameters that it had returned before"),
        ({"make_model": lambda: X}, "sweep: make_model must return a torch.nn.Module, got Tensor"),
    ],
)
def test_errors_come_before_any_run(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        swept(tmp_path, **options)
    assert str(raised.value).startswith(error)
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "made_here.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Linear(3, 2)\n"
        "def data():\n    x = torch.ones(16, 3)\n    y = torch.zeros(16, dtype=torch.long)\n    return x, y, x, y\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--points", "mxfp8", "--batches", "4,8", "--steps", "2", "--seeds", "2", "--out", "here"]
    assert main(["study", "sweep", "--model", "made_here:make", "--data", "made_here:data", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {Path('here') / 'report.md'}"
    assert {json.loads(line)["run"]["label"] for line in lines(tmp_path / "here")} == {"full precision", "mxfp8"}
    # The report's command repeats the sweep, from the configuration that is stored with it, and finds every result.
    (command,) = re.findall(r"`qsim (study sweep --config .*)`", (tmp_path / "here" / "report.md").read_text())
    before = lines(tmp_path / "here")
    assert main([*shlex.split(command), "--batches", "4"]) == 0
    assert lines(tmp_path / "here") == before


def test_a_configuration_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, error in (
        ("[]", "must be a JSON object, got list"),
        ('{"batch": 4}', "there is no option 'batch'. There are: batches, data, data_key, designs, device,"),
        ("{", "is malformed: "),
    ):
        (tmp_path / "study.json").write_text(content)
        assert main(["study", "sweep", "--config", str(tmp_path / "study.json")]) == 2
        assert error in capsys.readouterr().err
    assert main(["study", "sweep", "--model", "math:pi"]) == 2
    assert "sweep: --data is missing" in capsys.readouterr().err


def test_points_of_a_configuration_are_those_of_the_objects(tmp_path: Path) -> None:
    points = {"P": FivePoint(act="e4m3", act_bwd=None), "R": qsim.recipes.mxfp8(), "FP32": None}
    config = configuration(Sources(make, data, nn.functional.cross_entropy, torch.optim.AdamW), points, SETTINGS)
    (tmp_path / "study.json").write_text(json.dumps(config))
    read = _configured(tmp_path / "study.json", set(config))
    assert read["points"]["R"] == points["R"]
    assert FivePoint.from_dict(read["points"]["P"]) == points["P"]
    assert read["model"] == f"{__name__}:make"
    with pytest.raises(ValueError, match=r"model is .*layers.<locals>.<lambda>, which cannot be imported by this name"):
        configuration(Sources(layers(3), data, nn.functional.cross_entropy, torch.optim.AdamW), points, SETTINGS)
    said = write_configuration(tmp_path, Sources(make, DATA, nn.functional.cross_entropy, torch.optim.AdamW), points, SETTINGS)
    assert said.endswith("no command repeats it, because data is not a function of a module")


def test_designs(tmp_path: Path) -> None:
    result = swept(tmp_path, batches=[8, 16, 32], steps=4, seeds=1, designs=["steps", "examples"])
    assert sorted({(row["batch"], row["steps"]) for row in result.rows()}) == [(8, 4), (8, 8), (16, 4), (32, 2), (32, 4)]
    assert result.losses("mxfp4", 16, 1e-2, "steps") == result.losses("mxfp4", 16, 1e-2, "examples")
    assert result.losses("mxfp4", 8, 1e-2) != result.losses("mxfp4", 8, 1e-2, "examples")
    page = (tmp_path / "report.md").read_text()
    assert "## Test loss, equal steps" in page
    assert "## Test loss, equal examples" in page
    assert [path.name for path in sorted(tmp_path.glob("*[12].svg"))] == ["losses-1.svg", "losses-2.svg"]


@pytest.mark.parametrize(
    ("compare", "options", "labels"),
    [
        (studies.compare_batch_sizes, {"batches": [8]}, ["full precision", "e4m1, stochastic", "e4m1, nearest"]),
        (studies.compare_formats, {"formats": ["e4m3", "e2m1"]}, ["full precision", "e4m3", "e2m1"]),
        (studies.compare_points, {"format": "e4m3"}, ["full precision", "act", "weight", "act_bwd", "weight_bwd", "grad"]),
        (studies.compare_learning_rates, {"points": ["mxfp8"], "rates": [1e-2, 1e-3]}, ["full precision", "mxfp8"]),
        (studies.compare_random_bits, {"format": "e4m3", "bits": [1, 4]}, ["32 bits", "1 bit", "4 bits", "full precision"]),
        (studies.compare_accumulators, {"accumulators": ["h100_fp8"]}, ["fp8_hybrid", "h100_fp8", "full precision"]),
        (studies.compare_recipes, {"recipes": ["mxfp8"]}, ["full precision", "mxfp8"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_shortcuts_are_sweeps(compare: Any, options: dict[str, Any], labels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes points that convert a model, without a training here."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("qsim.studies.sweeps.shortcuts.sweep", lambda *parts, **chosen: given.update(chosen, parts=parts))
    compare(make, DATA, nn.functional.cross_entropy, steps=1, **options)
    points = given["points"] if isinstance(given["points"], dict) else {"full precision": None, **{name: name for name in given["points"]}}
    assert list(points) == labels
    assert given["steps"] == 1
    for chosen in points.values():
        if chosen is not None:
            qsim.convert(make(), chosen)


def test_a_larger_batch_is_no_answer_where_gradients_underflow(tmp_path: Path) -> None:
    """Half of E4M1's smallest number is 1/256, and the gradients of a mean over 64 examples are at most 1/64."""
    given = {"batches": [8, 64], "steps": 2, "seeds": 2, "folder": tmp_path / "none"}
    refused = (
        r"compare_batch_sizes: under 'e4m1, stochastic', \d+\.\d\d % of the gradients at grad of layer '\d' underflow: a larger batch of a "
        r"mean loss makes each smaller, so no factor holds; multiply the loss by \d+ or more, or give them a scale, such as "
        r"scale='tensor', or a format with more exponent bits, such as Float\(8, 1\)"
    )
    with pytest.raises(ValueError, match=refused):
        studies.compare_batch_sizes(make, DATA, lambda out, y: nn.functional.cross_entropy(out, y) / 4, scale=None, **given)
    assert not (tmp_path / "none").exists(), "before any work"
    for chosen in ({}, {"scale": None, "formats": ["e8m1"]}):
        found = studies.compare_batch_sizes(
            make, DATA, nn.functional.cross_entropy, **{**given, **chosen, "folder": tmp_path / str(chosen)}
        )
        assert {row["underflow"] for row in found.rows()} == {0.0}


def test_gradients_that_underflow_at_the_end_decide_nothing_about_batches() -> None:
    """They become smaller in training, so the first batch does not show all."""

    def closes(underflow: float) -> Any:
        settings = Settings(("full precision", "narrow"), (8, 64), (1e-2,), 10, 3, 0.01)
        ways = itertools.product(settings.labels, settings.batches, range(3))
        results = [
            Result(
                Run(label=label, batch=batch, rate=1e-2, steps=10, seed=seed, points=""),
                {
                    "test_loss": 1.0 + (label == "narrow") * 8 / batch + 0.001 * seed * (label == "narrow"),
                    "problem": "",
                    "underflow": underflow * (label == "narrow") * (batch == 64) * (seed == 1),
                },
                1.0,
                {},
            )
            for label, batch, seed in ways
        ]
        return Sweep(studies.named("batch-size"), settings, results, "A model").report.claims[-1]

    assert (closes(0.0).agrees, closes(0.78).agrees) == (True, None)
    assert closes(0.78).measured.endswith("; 78.00 % of the gradients at a point underflow")
    assert (
        closes(0.78).rule
        == "the sign of the interval; undecided if most gradients underflow: a larger batch of a mean loss makes them smaller"
    )


@pytest.mark.parametrize(
    ("compare", "options"),
    [
        (studies.compare_batch_sizes, {"formats": ["e4m1", "e8m0"]}),
        (studies.compare_formats, {"formats": ["e8m0"]}),
        (studies.compare_points, {"format": "e8m0"}),
        (studies.compare_random_bits, {"format": "e8m0"}),
    ],
)
def test_formats_without_negative_numbers_give_no_verdicts(compare: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{compare.__name__}: 'e8m0' has no negative numbers, which operands and gradients have; use a"):
        compare(make, DATA, nn.functional.cross_entropy, **options)


def test_a_report_names_the_model_the_data_the_optimizer_and_the_loss(tmp_path: Path) -> None:
    given = {"points": ["mxfp4"], "batches": [8], "steps": 1, "seeds": 2, "make_optimizer": torch.optim.SGD}
    studies.sweep(make, data, nn.functional.cross_entropy, folder=tmp_path, **given)
    said = (
        "A Sequential with 146 parameters, made by `make`, learns 64 examples from `data` and is tested on 32 others, by SGD; the loss is "
        "`cross_entropy`. 1 updates, 2 seeds, "
    )
    assert said in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "made by a function without a name, learns 64 examples and is" in Sources(
        lambda: make(), DATA, nn.functional.mse_loss
    ).described(0.1)


def test_shortcuts_that_make_points_take_no_others() -> None:
    expected = "compare_batch_sizes makes the points itself, from formats and roundings; qsim.studies.sweep takes points= of your own"
    with pytest.raises(TypeError, match=re.escape(expected)):
        studies.compare_batch_sizes(torch.nn.Identity, (), torch.nn.functional.mse_loss, points={"FP8": "mxfp8"})


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("make", "sweep: --model must be MODULE:FUNCTION, got 'make'"),
        ("no_such_module:make", "sweep: --model: no_such_module:make: No module named 'no_such_module'"),
        ("math:make", "sweep: --model: math:make: module 'math' has no attribute 'make'"),
    ],
)
def test_errors_of_the_command_line(place: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "sweep", "--model", place, "--data", "math:pi", "--points", "mxfp8"]) == 2
    assert error in capsys.readouterr().err
