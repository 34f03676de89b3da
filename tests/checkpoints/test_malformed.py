"""Files that were damaged, or written to do harm: whatever they hold, the error is one type, and the model unchanged."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import qsim
from qsim import FivePoint, Quantizer, scaling, studies
from qsim.studies.learners import images
from qsim.studies.store import Store
from support import idx_files

#: `QSIM_FUZZ=20000 pytest tests/checkpoints/test_malformed.py -s` reads that many files for each test, and prints what became of them.
EXAMPLES = int(os.environ.get("QSIM_FUZZ", "0"))
FUZZ = settings(max_examples=EXAMPLES or 40)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


@cache
def folder(kind: str) -> Path:
    """A folder as `save` or `export` writes it."""
    place = Path(mkdtemp()) / kind
    if kind == "saved":
        qsim.save(qsim.convert(model(), "mxfp4"), place, max_shard_size=3000)
    elif kind == "delayed":
        point = Quantizer("e4m3", scale=scaling.Delayed(4))
        delayed = qsim.convert(model(), FivePoint(point, point, act_bwd=None, weight_bwd=None))
        delayed(torch.randn(2, 32))
        qsim.save(delayed, place)
    else:
        qsim.export(qsim.convert(model(), "mxfp8"), place, kind.removeprefix("foreign "))
    if kind.startswith("foreign "):
        (place / "qsim.json").unlink()  # what other programs write
    return place


_WORDED = r"(load|points|Trace\.load|FivePoint\.from_json|studies|data): "


class Outcomes:
    """The number of reads by how they ended."""

    OUTCOMES: ClassVar[dict[str, Callable[[Exception | None], bool]]] = {
        "read": lambda error: error is None,
        "malformed": lambda error: isinstance(error, qsim.FileError) and bool(re.match(_WORDED, str(error))),
        "missing": lambda error: isinstance(error, FileNotFoundError),
        "another model": lambda error: "architecture" in str(error) or "the model" in str(error),
    }

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def read(self, action: Callable[[], object]) -> None:
        """Read: nothing but a result, another architecture or a malformed file may come of it."""
        error: Exception | None = None
        try:
            action()
        except (FileNotFoundError, ValueError) as raised:
            error = raised
        outcome = next(name for name, is_it in self.OUTCOMES.items() if is_it(error))
        self.counts[outcome] = self.counts.get(outcome, 0) + 1


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    counted = Outcomes()
    yield counted
    assert counted.counts.get("malformed"), "nothing was refused"
    if EXAMPLES:
        print(f"\n{request.node.name}: {counted.counts}")


def check(kind: str, change: Callable[[Path], None], outcomes: Outcomes) -> None:
    """Load from a copy of a folder after a change; where loading fails, the model has its own weights and no points."""
    place = Path(mkdtemp())
    shutil.copytree(folder(kind), place, dirs_exist_ok=True)
    change(place)
    other = model()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    failed = outcomes.counts.get("read", 0)
    outcomes.read(lambda: qsim.load(other, place))
    if outcomes.counts.get("read", 0) == failed:
        assert type(other[0]) is nn.Linear
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    outcomes.read(lambda: qsim.checkpoints.points(place))
    shutil.rmtree(place)


def jsons(kind: str) -> list[str]:
    return sorted(path.name for path in folder(kind).glob("*.json"))


KINDS = ["saved", "delayed", "compressed-tensors", "torchao", "foreign compressed-tensors", "foreign torchao"]
#: Texts that mean something, where another one would be right.
_WORDS = [
    "e2m1",
    "nvfp4",
    "Float(8, 23)",
    "stochastic",
    "same",
    "PerTensor()",
    "PerBlock(16)",
    "Delayed(history=5)",
    "h100_fp8",
    "Linear",
    "re:(",
    # Longer than the names of files, with more digits than Python reads, and what no encoding has.
    "x" * 5000,
    "e4m" + "9" * 5000,
    "\ud800",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(_WORDS) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path to every value of a JSON document."""
    yield ()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from ((key, *rest) for rest in places(each))


def replaced(value: Any, path: tuple[Any, ...], other: Any, remove: bool) -> Any:
    """A document with another value at a path, or without it."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    if remove and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(value[path[0]], path[1:], other, remove)
    return copy


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Bytes that were truncated, changed at a place, or replaced."""
    way, at = data.draw(st.sampled_from(["truncated", "changed", "random"])), data.draw(st.integers(0, len(content) - 1))
    some = data.draw(st.binary(min_size=1, max_size=40))
    return {"truncated": content[:at], "changed": content[:at] + some + content[at + len(some) :], "random": some}[way]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_value_of_json_changed(kind: str, outcomes: Outcomes) -> None:
    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(jsons(kind)))
        content = json.loads((folder(kind) / name).read_text())
        path = data.draw(st.sampled_from(list(places(content))))
        changed = replaced(content, path, data.draw(VALUES), data.draw(st.booleans()))
        check(kind, lambda place: (place / name).write_text(json.dumps(changed)) and None, outcomes)

    run()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_value_of_headers_changed(outcomes: Outcomes) -> None:
    """torchao's layout describes its tensors in JSON in the header of a safetensors file."""
    name = "model.safetensors"
    path = folder("torchao") / name
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = file.metadata()

    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(header) - {"format"})))
        content = json.loads(header[key])
        path = data.draw(st.sampled_from(list(places(content))))
        text = json.dumps(replaced(content, path, data.draw(VALUES), data.draw(st.booleans())))
        changed = {**header, key: text[: data.draw(st.sampled_from([None, len(text) // 2]))]}
        check("torchao", lambda place: save_file(tensors, place / name, changed), outcomes)

    run()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bytes_truncated_changed_and_random(kind: str, outcomes: Outcomes) -> None:
    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(path.name for path in folder(kind).iterdir())))
        content = (folder(kind) / name).read_bytes()
        changed = damaged(data, content)
        check(kind, lambda place: (place / name).write_bytes(changed) and None, outcomes)

    run()


@dataclass(frozen=True)
class Toss:
    seed: int
    sides: tuple[int, ...] = (1, 2)


class Coins(studies.Study[Any, Toss]):
    name, question, source, settings, run, version = "coins", "Are they fair?", "a pocket", Toss, Toss, 3


Coins.__abstractmethods__ = frozenset()
MACHINE = {"device": "a CPU", "torch": "2", "qsim": "0", "date": "today"}
LINE = {
    "study": "coins",
    "version": 3,
    "run": {"seed": 1, "sides": [1, 2]},
    "values": {"heads": 1},
    "seconds": 0.5,
    "machine": MACHINE,
}


def test_lines_of_studies(outcomes: Outcomes, tmp_path: Path) -> None:
    store = Store(tmp_path, Coins())

    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        changed = replaced(LINE, data.draw(st.sampled_from(list(places(LINE)))), data.draw(VALUES), data.draw(st.booleans()))
        text = json.dumps(changed)
        text = data.draw(st.sampled_from([text, text[: data.draw(st.integers(0, len(text)))], "[" * 100_000]))
        (tmp_path / "results.jsonl").write_text(text + "\n")
        outcomes.read(store.results)
        (tmp_path / "results.jsonl").write_bytes(data.draw(st.binary(min_size=1)))
        outcomes.read(store.results)

    run()


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "true", '"1"'])
def test_seconds_of_studies(seconds: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(LINE).replace("0.5", seconds))
    with pytest.raises(qsim.FileError, match=r"^studies: .*results\.jsonl, line 1 is malformed"):
        Store(tmp_path, Coins()).results()


def test_a_lost_last_newline_loses_no_result(tmp_path: Path) -> None:
    store = Store(tmp_path, Coins())
    (tmp_path / "results.jsonl").write_text(json.dumps(LINE))
    store.add(studies.Result(Toss(2), {"heads": 0}, 1.0, MACHINE))
    assert [result.run.seed for result in store.results().values()] == [1, 2]


def test_results_are_not_written_through_links_next_to_them(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "results.tmp").symlink_to(tmp_path / "thesis.tex")
    Store(tmp_path, Coins()).add(studies.Result(Toss(2), {"heads": 0}, 1.0, MACHINE))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert [result.run.seed for result in Store(tmp_path, Coins()).results().values()] == [2]


@pytest.mark.parametrize(
    ("part", "message"),
    [("values", "line 1 is malformed: its values lack 'heads'"), ("machine", r"line 1 is malformed: it\['machine'\] lacks 'device'")],
)
def test_what_a_line_lacks_is_named_with_the_line(part: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps({**LINE, part: {}}))
    with pytest.raises(qsim.FileError, match=message):
        next(iter(Store(tmp_path, Coins()).results().values()))["heads"]


def cifar_batch() -> bytes:
    return pickle.dumps({b"data": idx_files.random((2, 3072)), b"labels": [1, 2]}, protocol=2)


IMAGES = {
    "MNIST": ({name: idx_files.idx(array) for name, array in idx_files.parts().items()}, 16),
    "MNIST zipped": ({f"{name}.gz": gzip.compress(idx_files.idx(array)) for name, array in idx_files.parts().items()}, 30),
    "CIFAR": (dict.fromkeys((*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"), cifar_batch()), 200),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images(kind: str, outcomes: Outcomes, tmp_path: Path) -> None:
    files, head = IMAGES[kind]

    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        name = data.draw(st.sampled_from(sorted(files)))
        # Pixels may have any values: most changes are at the beginning.
        part = data.draw(st.sampled_from([head, len(files[name])]))
        (tmp_path / name).write_bytes(damaged(data, files[name][:part]) + files[name][part:])
        outcomes.read(lambda: images.images.__wrapped__(str(tmp_path), torch.device("cpu")))

    run()


def test_indexes_of_traces(outcomes: Outcomes, tmp_path: Path) -> None:
    qsim.diagnostics.trace(nn.Linear(2, 2), torch.ones(1, 2), folder=tmp_path / "trace")
    content = (tmp_path / "trace" / "trace.json").read_bytes()
    index = json.loads(content)

    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(list(places(index))))
        changed = json.dumps(replaced(index, path, data.draw(VALUES), data.draw(st.booleans()))).encode()
        for file in (changed, damaged(data, content)):
            (tmp_path / "trace" / "trace.json").write_bytes(file)
            outcomes.read(lambda: qsim.diagnostics.Trace.load(tmp_path / "trace"))

    run()


def test_points_as_text(outcomes: Outcomes) -> None:
    text = qsim.recipes.mxfp4().points.to_json()

    @FUZZ
    @given(st.data())
    def run(data: st.DataObject) -> None:
        content = json.loads(text)
        path = data.draw(st.sampled_from(list(places(content))))
        outcomes.read(lambda: FivePoint.from_json(json.dumps(replaced(content, path, data.draw(VALUES), data.draw(st.booleans())))))
        outcomes.read(lambda: FivePoint.from_json(text[: data.draw(st.integers(0, len(text)))]))

    run()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"act": "' + "Float(" * 5000 + '"}'])
def test_deep_nesting(text: str, tmp_path: Path) -> None:
    with pytest.raises(qsim.FileError):
        FivePoint.from_json(text)
    (tmp_path / "qsim.json").write_text(text)
    with pytest.raises(qsim.FileError, match=r"load: .*qsim\.json is malformed"):
        qsim.load(model(), tmp_path)


_OUTSIDE = [
    "../outside.safetensors",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    "..\\outside.safetensors",
    "C:outside",
    "x" * 5000,
    "\ud800",
    "",
]


@pytest.mark.parametrize("name", _OUTSIDE)
def test_an_index_names_files_of_its_own_folder(name: str, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    shutil.copytree(folder("saved"), place)
    save_file({"0.weight": torch.zeros(32, 32)}, tmp_path / "outside.safetensors")
    index = json.loads((place / "model.safetensors.index.json").read_text())
    index["weight_map"]["0.weight"] = name
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(qsim.FileError, match=r"is malformed: it names .*, which is not a file in its folder"):
        qsim.load(model(), place)


def test_links_in_the_folder_are_followed(tmp_path: Path) -> None:
    # Hugging Face's cache keeps the files of a model elsewhere, and links to them.
    place = tmp_path / "saved"
    shutil.copytree(folder("saved"), place)
    for file in list(place.glob("*.safetensors")):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    assert qsim.nn.conversion(qsim.load(model(), place))


def test_points_are_not_counted_from_the_end(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    shutil.copytree(folder("saved"), place)
    facts = json.loads((place / "qsim.json").read_text())
    facts["conversion"]["layers"]["0"]["points"] = -1
    (place / "qsim.json").write_text(json.dumps(facts))
    with pytest.raises(qsim.FileError, match="0 has the points number -1, of 1 that are listed"):
        qsim.load(model(), place)


def with_points(place: Path, *points: FivePoint) -> None:
    """Let every layer in a folder have other points."""
    facts = json.loads((place / "qsim.json").read_text())
    facts["conversion"]["points"] = [each.to_dict() for each in points]
    for i, layer in enumerate(facts["conversion"]["layers"].values()):
        layer["points"] = min(i, len(points) - 1)
    (place / "qsim.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("kind", "length", "message"),
    [
        ("delayed", 5, r"the files have 0\.act_amaxes in shape \(4,\), and the delayed scale needs \(5,\)"),
        ("saved", 4, r"the files have no tensor '0\.act_amaxes', the history of a delayed scale"),
    ],
)
def test_histories_must_be_those_of_the_delayed_scales(kind: str, length: int, message: str, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    shutil.copytree(folder(kind), place)
    point = Quantizer("e4m3", scale=scaling.Delayed(length))
    with_points(place, FivePoint(point, point, act_bwd=None, weight_bwd=None))
    other = model()
    with pytest.raises(qsim.FileError, match=message):
        qsim.load(other, place)
    assert type(other[0]) is nn.Linear


def test_points_that_a_layer_cannot_have_change_nothing(tmp_path: Path) -> None:
    layers = [nn.Embedding(8, 16), nn.Linear(16, 16)]
    qsim.save(qsim.convert(nn.Sequential(*layers), "fp8_hybrid", embeddings=True), tmp_path)
    with_points(tmp_path, FivePoint("e4m3", "e4m3", accumulate="h100_fp8", act_bwd=None, weight_bwd=None))
    other = qsim.convert(nn.Sequential(*layers), "mxfp8", embeddings=True)
    before = qsim.nn.conversion(other)
    with pytest.raises(ValueError, match="convert: 0: h100_fp8 in the sum for the table's gradient"):
        qsim.load(other, tmp_path)
    assert qsim.nn.conversion(other) == before


def test_packed_weights_of_another_shape(tmp_path: Path) -> None:
    place = tmp_path / "exported"
    shutil.copytree(folder("compressed-tensors"), place)
    (file,) = place.glob("*.safetensors")
    tensors = load_file(file)
    tensors["0.weight_scale"] = tensors["0.weight_scale"][:, :0].contiguous()
    save_file(tensors, file)
    other = model()
    before = other[0].weight.clone()
    with pytest.raises(qsim.FileError, match=r"load: .* is malformed"):
        qsim.load(other, place)
    assert torch.equal(other[0].weight, before)
    assert type(other[0]) is nn.Linear
