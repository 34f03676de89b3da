"""Comparing runs: of models of all sorts, of traces in files, and what the parts of a difference are."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint
from qsim.accumulators import Rounded
from qsim.diagnostics import Operation, Trace, compare, trace

WIDTH = 8


class Awkward(nn.Module):
    """Attention, a shared layer, a tied weight, dropout, operations in place, a frozen parameter, buffers and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.25, batch_first=True)
        self.shared, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.frozen
        x = x + self.attend(x, x, query := x, need_weights=False)[0] + 0 * query
        x = self.act(self.shared(x))
        x = self.drop(self.shared(x))
        x += self.shift
        x[..., 0] = torch.sigmoid(x[..., 1])
        mask = torch.rand_like(x) < 0.9
        x = self.norm((x * mask).flatten(0, 1)).view_as(x)
        q = x.clone().mul_(2.0)
        x = F.scaled_dot_product_attention(q, x, x, dropout_p=0.1)
        scores = F.linear(x, self.table.weight)  # a tied head
        with torch.no_grad():
            scores.add_(0.5)
        return scores


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def everything(model: nn.Module) -> dict[str, Any]:
    return {name: x.clone() for name, x in (*model.named_parameters(), *model.named_buffers())}


IDS = torch.arange(12).reshape(3, 4) % 11


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return qsim.optim.AdamW(parameters, lr=0.1, format="bf16", update="stochastic", seed=3)


@pytest.mark.parametrize("calls", [False, "all"], ids=["layers", "calls"])
def test_an_awkward_model_equals_its_copy(calls: Any) -> None:
    model = qsim.convert(Awkward(), "fp8_hybrid", calls=calls, embeddings=True) if calls else Awkward()
    found = compare(model, copy.deepcopy(model), IDS, loss, optimizer=adamw)
    assert found.first is None
    assert {record.own for record in found} == {0.0}
    names = [found.key(record) for record in found]
    assert {("shared", "Linear", "output"), ("shared", "Linear #2", "output"), ("table", "Embedding", "weight.grad")} <= set(names)
    assert names.index(("shared", "Linear", "grad_input")) > names.index(("shared", "Linear #2", "grad_input"))


def test_the_gradient_of_a_shared_layer_is_that_of_all_its_calls() -> None:
    model = Awkward().eval()
    changed = copy.deepcopy(model)
    qsim.convert(changed.shared, FivePoint(act_bwd="e4m1", act=None, weight=None, grad="fp32"))
    first = compare(model, changed, IDS, loss).first
    assert first is not None
    assert first.title == "weight.grad of shared (Linear)"
    assert first.own == pytest.approx(first.error, rel=1e-5)


def test_a_run_leaves_no_trace_in_the_model() -> None:
    model = qsim.convert(Awkward(), qsim.FivePoint("e4m3", qsim.Quantizer("e4m3", "stochastic")))
    loss(model, IDS).backward()
    before, stream = everything(model), model.shared.stream
    gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    other, generator = copy.deepcopy(model), torch.get_rng_state()
    compare(model, other, IDS, loss, optimizer=adamw)
    assert all(torch.equal(x, before[name]) for name, x in everything(model).items())
    assert all(torch.equal(own.grad, gradients[name]) for name, own in model.named_parameters() if own.grad is not None)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.shared.stream == stream
    assert not model.shared._forward_hooks
    assert not model.shared._forward_pre_hooks


def test_what_is_recorded_is_what_the_model_computes() -> None:
    model = qsim.convert(
        nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 11)), "mxfp8"
    )
    found = trace(model, IDS, loss)
    value = loss(model, IDS)
    value.backward()
    assert torch.equal(found.tensors[":cross_entropy/output.0"], value.detach())
    assert all(torch.equal(found.tensors[f"{name}/grad"], own.grad) for name, own in model.named_parameters())


def test_the_parts_of_a_difference() -> None:
    """An accumulator with 4 bits, and operands with few: both parts are what they are without the other."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(16, 64)

    def difference(points: FivePoint, layer: str = "0") -> Any:
        return compare(model, qsim.convert(copy.deepcopy(model), points), x)[layer, "Linear", "output"]

    coarse = Rounded(qsim.Float(8, 4))
    both, rounded, summed = (
        difference(p) for p in (FivePoint("e4m1", "e4m1", accumulate=coarse), FivePoint("e4m1", "e4m1"), FivePoint(accumulate=coarse))
    )
    assert both.own == both.error
    assert both.operands == pytest.approx(rounded.error, rel=1e-6)
    assert rounded.accumulation < 1e-6 < rounded.operands
    assert summed.operands < 1e-6 < summed.accumulation == pytest.approx(both.accumulation, rel=0.3)
    second = difference(FivePoint("e4m1", "e4m1"), "1")
    assert 0.5 * second.error < second.inherited < 2 * second.error
    assert second.own == pytest.approx(difference(FivePoint("e4m1", "e4m1"), "0").own, rel=0.3)


def test_weights_whose_difference_is_rounded_away_are_no_cause() -> None:
    """Weights differ by less than their rounding: the layer computes the same, so what it returns differs by its input only."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), qsim.nn.Linear(8, 8, points=FivePoint(weight="e4m3"))
    with torch.no_grad():
        second.weight.copy_(second.points.weight(second.weight))
    model = nn.Sequential(first, second)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0, 0] += 1.0
        other[1].weight.mul_(1 + 2**-12)
    record = compare(model, other, torch.randn(4, 8))["1", "Linear", "output"]
    assert record.error > 0
    assert (record.own, record.cause) == (0, "inherited")


def test_bfloat16_against_float32() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    x = torch.randn(16, 64)
    found = compare(model, copy.deepcopy(model).bfloat16(), x.clone(), lambda model, x: model(x.to(model[0].weight.dtype)).float().sum())
    first = found.first
    assert first is not None
    assert (first.layer, first.cause) == ("0", "state")
    # The exact product of rounded operands differs by them, and a result of 8 bits by at most half a unit in the last place.
    exact = F.linear(x.bfloat16().double(), model[0].weight.bfloat16().double())
    plain = F.linear(x.double(), model[0].weight.double())
    assert first.operands == pytest.approx(float((exact - plain).norm() / plain.norm()), rel=1e-3)
    assert 0 < first.accumulation < 2**-8
    assert found.only_b == ("to",) or found.only_b == (":to", ":float")


def test_a_checkpointed_model_equals_itself_without() -> None:
    class Block(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.up, self.drop, self.again = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), again

        def body(self, x: Tensor) -> Tensor:
            return F.dropout(self.drop(torch.tanh(self.up(x))), 0.25)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)

    plain, again = nn.Sequential(Block(False), Block(False)), nn.Sequential(Block(True), Block(True))
    again.load_state_dict(plain.state_dict())
    found = compare(plain, again, torch.randn(3, WIDTH))
    assert found.first is None
    assert len(found) > 12


def test_a_folder_and_a_file_are_traces(tmp_path: Path) -> None:
    model = qsim.convert(Awkward(), "fp8_hybrid")
    other = copy.deepcopy(model)
    other.norm.eps = 1e-3
    in_memory = compare(model, other, IDS, loss, optimizer=adamw)
    kept = trace(model, IDS, loss, optimizer=adamw, folder=tmp_path / "folder")
    kept.save(tmp_path / "file.safetensors")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) == len(kept.tensors)
    for path in (tmp_path / "folder", tmp_path / "file.safetensors"):
        found = compare(path, other, IDS, loss, optimizer=adamw)
        assert found.first is not None
        assert in_memory.first is not None
        assert found.first.title == in_memory.first.title
        assert [(r.title, r.cause) for r in found] == [(r.title, r.cause) for r in in_memory]
        for size in ("error", "own", "inherited"):  # norms depend on how a tensor lies in memory
            sizes = [getattr(r, size) for r in in_memory]
            assert [getattr(r, size) for r in found] == pytest.approx(sizes, rel=1e-12, abs=0, nan_ok=True)
        assert compare(path, Trace.load(tmp_path / "file.safetensors")).first is None
    with pytest.raises(FileExistsError, match=r"trace: .*folder is not empty"):
        trace(model, IDS, loss, folder=tmp_path / "folder")


def test_two_traces_know_what_arises_where_inputs_are_equal() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    other = copy.deepcopy(model)
    other[1].eps = 1e-2
    found = compare(*(trace(each, torch.ones(3, WIDTH)) for each in (model, other)))
    first = found.first
    assert first is not None
    assert (first.layer, first.cause, first.own) == ("1", "settings", first.error)
    assert {record.cause for record in found if record.layer == "0" and record.error} == {"unknown"}


def test_a_file_of_another_program(tmp_path: Path) -> None:
    """It has some outputs, in no order and without a description."""
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))
    x = torch.randn(3, WIDTH)
    outputs = {"0/output.0": model[0](x), "1/output.0": model[:2](x) + 1e-3, "2/output.0": model(x)}
    save_file({name: value.detach() for name, value in outputs.items()}, tmp_path / "run.safetensors")
    found = compare(tmp_path / "run.safetensors", model, x)
    assert [(r.layer, r.tensor) for r in found] == [("0", "output"), ("1", "output"), ("2", "output")]
    assert found.first is not None
    assert found.first.title == "output of 1 (GELU)"


def test_an_operation_that_only_one_run_has() -> None:
    class Extra(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(max=100.0)

    layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    found = compare(nn.Sequential(*layers), Extra(*layers), torch.ones(3, WIDTH), backward=False)
    assert (found.first, found.only_a, found.only_b) == (None, (), (":clamp",))
    assert str(found).splitlines()[-1] == "only in b: :clamp"


def test_a_class_derived_from_a_layer_is_named_as_what_only_one_run_has() -> None:
    derived = type("Derived", (nn.Linear,), {})(4, 4)
    printed = str(compare(nn.Linear(4, 4), derived, torch.randn(2, 4)))
    assert re.search(
        "inherited, perhaps from an operation that only one run has.*only in a: \\(the model\\)\nonly in b: :linear", printed, re.S
    )


def test_gradients_that_only_one_run_has() -> None:
    """A frozen parameter, or a detached tensor: all that both runs compute is equal."""

    class Cut(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x).detach())

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    model = nn.Sequential(*layers)
    frozen = copy.deepcopy(model)
    frozen[0].weight.requires_grad_(False)
    x = torch.ones(3, WIDTH)
    found = compare(model, frozen, x, optimizer=sgd)
    assert (found.first, found.only_a, found.only_b) == (None, ("0.weight.grad", "0.weight.updated"), ())
    assert compare(frozen, model, x).only_b == ("0.weight.grad",)
    assert compare(frozen, model, x, backward=False).only_b == ()
    assert sorted(compare(model, Cut(*layers), x).only_a) == ["0.bias.grad", "0.weight.grad"]


def test_noise_is_the_same_although_one_run_draws_more() -> None:
    """Stochastic rounding draws seeds from torch's generator; the dropout behind it is the same as without, and so are weights' noise."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    stochastic = qsim.convert(copy.deepcopy(model), FivePoint(grad=qsim.Quantizer("e5m2", "stochastic")))
    assert compare(model, stochastic, torch.randn(3, WIDTH), backward=False).first is None
    weights = FivePoint(weight=qsim.Quantizer("e4m1", "stochastic"))
    one, other = (qsim.convert(copy.deepcopy(model), weights) for _ in range(2))
    assert one[0].stream != other[0].stream
    assert compare(one, other, torch.randn(3, WIDTH)).first is None


def test_tolerance_and_shapes() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    other = copy.deepcopy(model)
    other[0].bias.data += 1e-4
    x = torch.ones(1, WIDTH)
    first = compare(model, other, x).first
    assert first is not None
    assert first.cause == "state"
    assert compare(model, other, x, tolerance=1e-2).first is None
    assert str(compare(model, other, x, tolerance=0.5)).splitlines()[0] == "no difference beyond 0.5 in 5 tensors"
    wide = compare(model, nn.Sequential(nn.Linear(WIDTH, 4)), x).first
    assert wide is not None
    assert wide.cause == "shapes (1, 8) and (1, 4)"


def test_not_a_number_differs_from_a_number_only() -> None:
    class Spoils(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([1.0, self.value])

    x = torch.ones(2, 2, requires_grad=True)
    assert compare(Spoils(float("nan")), Spoils(float("nan")), x).first is None
    first = compare(Spoils(2.0), Spoils(float("nan")), x).first
    assert first is not None
    assert (first.error, first.ulps) == (float("inf"), float("inf"))


def test_gpt2() -> None:
    """The layers of another package, before and after their conversion: the first difference is in the first converted layer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    converted = qsim.convert(copy.deepcopy(model), "mxfp8")
    ids = torch.randint(32, (2, 8))
    found = compare(model, converted, {"input_ids": ids, "labels": ids})
    assert found.first is not None
    assert found.first.title == "output of transformer.h.0.attn.c_attn (Conv1D)"
    assert (found.only_a, found.only_b) == ((), ())
    assert found["transformer.h.0.attn", "scaled_dot_product_attention", "output"].cause == "inherited"


def test_records_figure_and_json() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    found = compare(model, qsim.convert(copy.deepcopy(model), "e4m3", exclude="0"), torch.randn(3, WIDTH))
    content = json.loads(found.to_json())
    assert content["first"] == ["1", "Linear", "output"]
    assert len(content["differences"]) == len(found)
    assert found.worst("own")[0].layer == "1"
    pytest.importorskip("matplotlib").use("Agg")
    axes = found.plot()
    assert axes.get_yscale() == "log"
    assert {line.get_label() for line in axes.lines} == {"difference", "arises here", "first difference"}


MODEL = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3, MODEL, torch.ones(1, 2)), {}, TypeError, "compare: a must be a model, a Trace or the path of one, got 3"),
        ((MODEL, MODEL), {}, TypeError, "compare: a is a model, so batch must be given"),
        (
            (MODEL, MODEL, torch.ones(1, 2)),
            {"tolerance": -1},
            ValueError,
            "compare: tolerance must be a number that is not negative, got -1",
        ),
        ((MODEL, MODEL, torch.ones(1, 2)), {"optimizer": adamw, "backward": False}, ValueError, "compare: optimizer needs gradients"),
        (
            (MODEL, MODEL, torch.ones(1, 2)),
            {"optimizer": len},
            TypeError,
            "optimizer must be a function that makes a torch.optim.Optimizer",
        ),
        ((MODEL, MODEL, torch.ones(1, 2), lambda m, x: 3), {}, ValueError, "compare: loss must return one differentiable number, got 3"),
        ((MODEL, "nowhere.safetensors", torch.ones(1, 2)), {}, FileNotFoundError, "Trace.load: there is no nowhere.safetensors"),
        ((MODEL, nn.Sequential(nn.Identity()), torch.ones(1, 2)), {"backward": False}, None, ""),
        (
            (MODEL, nn.ModuleDict({"x": nn.Linear(2, 2)}).x, torch.ones(1, 2)),
            {"backward": False},
            ValueError,
            "the runs share no operation: a has '0' …",
        ),
        ((torch.compile(MODEL), MODEL, torch.ones(1, 2)), {}, ValueError, "compare: the model is compiled"),
    ],
)
def test_errors(arguments: Any, options: Any, error: Any, message: str) -> None:
    if error is None:
        assert compare(*arguments, **options).first is not None
        return
    with pytest.raises(error, match=message):
        compare(*arguments, **options)


def test_malformed_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "a").write_bytes(b"nothing")
    with pytest.raises(qsim.FileError, match="a is malformed"):
        Trace.load(tmp_path / "a")
    for text, message in (("[]", "must be an object"), ('{"operations": []}', "lacks 'order'"), ("{", "malformed")):
        save_file({"x": torch.ones(1)}, tmp_path / "b", {"qsim_trace": text})
        with pytest.raises(qsim.FileError, match=message):
            Trace.load(tmp_path / "b")
    assert repr(Trace({"0": Operation("0", "Linear")})) == "Trace(1 operations, 0 tensors)"


class Products(nn.Module):
    """A product with a parameter, one with its transpose, attention, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(torch.relu(x @ self.weight), self.weight.mT)
        x = F.scaled_dot_product_attention(x, x, x)
        return x @ x.mT


PRODUCTS_OF_MODEL = ("matmul", "linear", "scaled_dot_product_attention", "matmul #2")


@pytest.mark.parametrize("before", [None, FivePoint("e5m2", "e5m2", "e5m2")], ids=["plain", "rounded"])
def test_products_outside_layers_differ_by_their_points(before: FivePoint | None) -> None:
    plain, x = nn.Sequential(Products()), torch.randn(2, 4, WIDTH)
    points = FivePoint("e4m3", "e4m3", "e4m3", accumulate=Rounded(qsim.Float(8, 5)))
    model = plain if before is None else qsim.convert(copy.deepcopy(plain), before, calls="all")
    found = compare(model, qsim.convert(copy.deepcopy(plain), points, calls="all"), x)
    assert (found.only_a, found.only_b) == ((), ())
    for name in PRODUCTS_OF_MODEL:
        for record in (own for own in found if own.operation == name and own.error > 0):
            assert (record.cause, record.own > 0) == ("settings", True)
            assert record.settings == ("" if before is None else repr(before), repr(points))
            # The accumulator with 5 bits makes a larger error than sums in full precision, and operands the same as without it. Gradients
            # of the last product are sums of four numbers, which 5 bits may hold. Of seeds 0 to 59, the smallest are 0.0049 and 0.0066.
            assert record.accumulation > 1e-3 or (name == "matmul #2" and record.tensor != "output")
            assert record.operands > 1e-3
    of_operands = compare(model, qsim.convert(copy.deepcopy(plain), FivePoint("e4m3", "e4m3", "e4m3"), calls="all"), x)
    first, alone = (each["0", "matmul", "output"] for each in (found, of_operands))
    assert first.operands == pytest.approx(alone.operands, rel=1e-5)
    assert alone.accumulation < 1e-6


def test_grouped_products_which_torch_does_not_compute_in_float64() -> None:
    class Groups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 16) / 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.grouped_mm(x, self.weight, offs=torch.tensor([3, 8], dtype=torch.int32)).square()

    model = nn.Sequential(Groups())
    converted = qsim.convert(copy.deepcopy(model), FivePoint("e4m3", "e4m3", "e4m3"))
    x = torch.randn(8, 16)
    assert compare(model, copy.deepcopy(model), x).first is None
    record = compare(model, converted, x)["0", "_grouped_mm", "output"]
    assert (record.cause, record.error) == ("settings", record.own)
    assert compare(converted, copy.deepcopy(converted), x).first is None


@pytest.mark.parametrize("attention", ["eager", "qsim"])
def test_attention_of_transformers_differs_by_its_points(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    import qsim.hugging_face

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes, attn_implementation=attention))
    converted = qsim.convert(copy.deepcopy(model), FivePoint("e4m3", "e4m3", "e4m3"), include="*attn*", calls="all")
    ids = torch.randint(16, (2, 6))
    found = compare(model, converted, {"input_ids": ids, "labels": ids})
    assert (found.only_a, found.only_b) == ((), ())
    for name in ("matmul", "matmul #2"):
        record = found["model.layers.0.self_attn", name, "output"]
        assert record.cause == "settings"
        assert record.accumulation < 1e-6 < record.operands
