"""The monitor: its counts against a direct computation, and that training does not feel it."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import qsim
from qsim import FivePoint, Quantizer
from qsim.diagnostics import Counts, Monitor, cancelled_updates
from qsim.nn import observers
from qsim.quantizer import short

NOISY = Quantizer("e5m2", rounding="stochastic")
POINTS = FivePoint(act="e4m3", weight="e4m3", act_bwd=NOISY, weight_bwd=Quantizer("e4m3", "stochastic"), grad=NOISY)
FIELDS = ("elements", "saturated", "underflowed", "exact", "nan", "zero", "infinite")


def direct(x: Tensor, rounded: Tensor, fmt: qsim.Format) -> tuple[dict[str, int], Counter[int]]:
    """The counts, in Python's numbers, one element after the other."""
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


def net(points: Any = POINTS, **options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    return qsim.convert(model, points, **options)


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
    """What goes into the points of linear layers: inputs, weights and upstream gradients."""
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
        assert sample[layer, point].quantizer == short(spec)


def test_gradients_of_their_own_and_reused_operands() -> None:
    points = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2", grad_w=Quantizer("e2m1"))
    model = net(points)
    with Monitor(model) as monitor:
        model(torch.randn(4, 32)).sum().backward()
        monitor.step()
    assert [counts.point for counts in monitor.samples[0].points if counts.layer == "2"] == ["act", "weight", "grad", "grad_w"]


def matrices(x: Tensor, spec: Quantizer, dim: int) -> tuple[Tensor, Tensor]:
    """Elements divided by the scales of blocks along a dimension, and what they become: from the codes that qsim gives."""
    along = qsim.scaling.Blocks(32, dim=dim, format="e8m0", rule="floor")
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
    assert sample["0", "act"].saturated > 0  # under the rule of OCP's formats some do
    # The gradient is scaled along what each of its products sums over: rounded twice.
    assert sample["0", "grad"].elements == 2 * y.numel()


def test_a_transform_comes_first() -> None:
    spec = Quantizer("e4m3", scale=qsim.scaling.Tensor(), transform=qsim.transforms.Hadamard(16))
    model = qsim.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), FivePoint(act=spec, weight=spec))
    x = torch.randn(8, 64) ** 5
    with Monitor(model) as monitor:
        model(x)
        monitor.step()
    turned = spec.transform.wide(x)  # type: ignore[union-attr]
    scale = turned.abs().max().double() / 448
    divided = turned * (1 / scale.float())
    assert told(monitor.samples[0]["0", "act"]) == direct(divided, qsim.quantize(divided, "e4m3"), spec.format)


@pytest.mark.parametrize("points", ["plain", "scaled", "delayed", "nvfp4"])
def test_training_gives_the_same_bits(points: str) -> None:
    recipes: dict[str, Any] = {
        "plain": POINTS,
        "scaled": qsim.recipes.mxfp8().points,
        "delayed": FivePoint(*[Quantizer("e4m3", scale=qsim.scaling.Delayed(history=4))] * 2, grad=Quantizer("e5m2", "stochastic")),
        "nvfp4": qsim.recipes.nvfp4().points,
    }
    ends = []
    for every in (None, 1, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.Dropout(0.2), qsim.nn.Quantize("e4m3", NOISY), nn.Linear(32, 50))
        qsim.convert(model, recipes[points], embeddings=points in ("plain", "delayed"))
        optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, update="stochastic", weight="bf16")
        monitor = Monitor(model, every=every, optimizer=optimizer) if every else None
        losses = []
        for _ in range(5):
            tokens = torch.randint(50, (4, 16))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            assert [sample.step for sample in monitor.samples] == list(range(0, 5, every))
            assert all(len(sample.points) >= 6 for sample in monitor.samples)
            monitor.close()
        ends.append((losses, [value.clone() for value in model.state_dict().values()], torch.get_rng_state()))
    for losses, state, generator in ends[1:]:
        assert losses == ends[0][0]
        assert all(torch.equal(one, other) for one, other in zip(state, ends[0][1], strict=True))
        assert torch.equal(generator, ends[0][2])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_units_that_round_every_operator_do_not_see_the_monitor(rounding: str) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        scaled = Quantizer("e4m3", scale=qsim.scaling.Tensor())
        model = net(FivePoint(act="mxfp8", weight="mxfp8", grad="mxfp8")).append(qsim.nn.Quantize(scaled, NOISY))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with qsim.fpu("bf16", rounding):
            monitor = Monitor(model, every=1) if watched else None
            cancelled = cancelled_updates(optimizer) if watched else None
            for _ in range(2):
                model(torch.randn(8, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step()
        ends.append([*(parameter.detach().clone() for parameter in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert monitor is not None
    assert cancelled is not None
    monitor.close()
    assert len(monitor.samples[1].points) == 8
    assert len(cancelled.updates) == 8


class Twice(nn.Module):
    """One layer that is called twice, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.first(self.first(x)))  # type: ignore[no-any-return]


def test_layers_called_twice_tied_weights_and_micro_batches() -> None:
    model = qsim.convert(Twice(), POINTS)
    with Monitor(model) as monitor:
        for _ in range(3):
            model(torch.randn(5, 16)).sum().backward()
        monitor.step()
    sample = monitor.samples[0]
    for point in ("act", "act_bwd", "grad"):
        assert sample["first", point].elements == 3 * 2 * 5 * 16
        assert sample["tied", point].elements == 3 * 5 * 16
    assert sample["first", "weight"].elements == 3 * 2 * 256
    assert sample["tied", "weight"].elements == 3 * 256


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("points", [POINTS, FivePoint(act="mxfp8", weight="mxfp8", act_bwd="mxfp8", weight_bwd="mxfp8", grad="mxfp8")])
def test_checkpointing_counts_once(points: FivePoint, reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = net(points)
        x = torch.randn(64, 32).requires_grad_()
        with Monitor(model) as monitor:
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            y.square().sum().backward()
            monitor.step()
        found.append(monitor.samples[0].to_dict())
    assert found[0] == found[1]
    assert len(found[0]["points"]) == 10


def test_only_sampled_steps_have_hooks() -> None:
    model = net()

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    monitor = Monitor(model, every=2)
    seen = []
    for _ in range(5):
        seen.append(hooks())
        model(torch.randn(2, 32)).sum().backward()
        monitor.step()
    assert seen == [4, 0, 4, 0, 4]
    assert [sample.step for sample in monitor.samples] == [0, 2, 4]
    monitor.close()
    assert hooks() == 0
    assert observers.current() is None
    model(torch.randn(2, 32))
    assert len(monitor.samples) == 3
    with pytest.raises(RuntimeError, match="Monitor: it is closed, and counts no more steps"):
        monitor.step()


def test_a_layer_that_fails_leaves_nobody_looking() -> None:
    model = net()
    with Monitor(model) as monitor:
        with pytest.raises(ValueError, match="does not fit"):
            model(torch.randn(2, 31))
        assert observers.current() is None
        model(torch.randn(2, 32))
        monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 64


def test_a_backward_pass_after_its_step_is_not_counted() -> None:
    model = net()
    with Monitor(model, every=2) as monitor:
        y = model(torch.randn(2, 32))
        monitor.step()
        y.sum().backward()
        monitor.step()
    assert {counts.point for counts in monitor.samples[0].points} == {"act", "weight"}


def test_copies_of_a_watched_model_are_not_watched() -> None:
    model = net()
    with Monitor(model) as monitor:
        copy.deepcopy(model)(torch.randn(2, 32))
        pickle.loads(pickle.dumps(model))(torch.randn(2, 32))
        with pytest.warns(RuntimeWarning, match="no layer rounded anything in step 0; compiled code"):
            monitor.step()
    assert monitor.samples[0].points == ()


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


def test_compiled_code_is_refused_or_left_alone() -> None:
    with pytest.raises(ValueError, match="Monitor: the model is compiled, and compiled code is not watched"):
        Monitor(torch.compile(net()))  # type: ignore[arg-type]
    model = net()
    model[2].compile(backend="eager")
    with pytest.raises(ValueError, match="Monitor: its module '2' is compiled"):
        Monitor(model)


def test_compiled_graphs_do_not_know_of_monitors() -> None:
    count = CompileCounter()
    other, watched = net(), net()
    torch._dynamo.reset()
    compiled = torch.compile(other, backend=count, fullgraph=True)
    x = torch.randn(4, 32)
    compiled(x)
    graphs = count.frame_count
    with Monitor(watched) as monitor:
        watched(x)
        compiled(x).sum().backward()
        monitor.step()
    compiled(x)
    assert count.frame_count == graphs == 1


def test_a_watched_model_inside_of_compiled_code_is_not_seen() -> None:
    count = CompileCounter()
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(lambda x: model(x), backend=count, fullgraph=True)
    x = torch.randn(4, 32)
    compiled(x)
    with Monitor(model, every=2) as monitor:
        for step in range(4):
            compiled(x)
            if step % 2:
                monitor.step()
                continue
            with pytest.warns(RuntimeWarning, match=f"no layer rounded anything in step {step}"):
                monitor.step()
    assert count.frame_count == 1
    assert monitor.samples[0].points == ()


class Writer:
    """Takes down what a TensorBoard writer would get."""

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
    _, monitor = sampled(writer=writer)
    counts = monitor.samples[1]["2", "grad"]
    assert writer.scalars["2/grad/underflowed", 2] == counts.shares["underflowed"]
    assert writer.scalars["2/grad/sqnr_db", 2] == counts.sqnr
    assert {step for _, step in writer.scalars} == {0, 2}
    if kind is RawWriter:
        facts = writer.histograms["2/grad/exponents", 2]
        assert facts["num"] == sum(facts["bucket_counts"]) == counts.elements - counts.zero
        assert dict(zip([limit - 1 for limit in facts["bucket_limits"]], facts["bucket_counts"], strict=True)) == {
            exponent: counts.exponents.get(exponent, 0) for exponent in range(counts.lowest, counts.lowest + len(counts.histogram))
        }
    if kind is ValuesWriter:
        assert Counter(writer.values["2/grad/exponents", 2].tolist()) == counts.exponents


def test_lines_of_json_and_plain_dictionaries(tmp_path: Path) -> None:
    _, monitor = sampled()
    path = tmp_path / "samples.jsonl"
    for _ in range(2):
        monitor.write(str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]
    assert [line["step"] for line in lines] == [0, 2]
    first, counts = lines[1]["points"][0], monitor.samples[1].points[0]
    assert (first["layer"], first["point"], first["elements"]) == ("0", "act", 16 * 32)
    assert {int(exponent): count for exponent, count in first["exponents"].items()} == counts.exponents
    assert sum(first["exponents"].values()) == 16 * 32
    summary = monitor.summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    facts = {"step": 0, "layer": "0", "point": "act", "elements": 512, **monitor.samples[0].points[0].shares}
    assert {name: value for name, value in summary[0].items() if name != "sqnr"} == facts
    assert 20 < summary[0]["sqnr"] < 40


def test_tables() -> None:
    _, monitor = sampled()
    table = str(monitor).splitlines()
    # The input needs no gradient: the first layer rounds no weight for the way back.
    assert (table[0], len(table)) == ("step 2", 2 + 9)
    assert table[1].split() == ["layer", "point", "quantizer", "elements", "saturated", "underflowed", "exact", "NaN", "SQNR"]
    assert monitor.table(0).startswith("step 0\n")
    with pytest.raises(ValueError, match=r"step 1 was not sampled; sampled were 0, 2"):
        monitor.table(1)
    with Monitor(net()) as empty:
        assert str(empty).startswith("no sample yet: it ends with its step, which monitor.step() tells")
    with pytest.raises(KeyError, match="nothing was rounded at 'grad_w' of '0' in step 0: points that rounded there are act, weight, "):
        monitor.samples[0]["0", "grad_w"]
    with pytest.raises(KeyError, match="at 'act' of 'head' in step 0: no point of that layer rounded, or there is no such"):
        monitor.samples[0]["head", "act"]


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, monitor = sampled()
    exponents, shares = monitor.plot_exponents("2"), monitor.plot_shares("2")
    for name, figure in (("exponents", exponents), ("shares", shares)):
        for kind in ("png", "svg"):
            figure.savefig(tmp_path / f"{name}.{kind}")
            assert (tmp_path / f"{name}.{kind}").stat().st_size > 5000
    assert len(exponents.axes) == 5
    heights = sum(patch.get_height() for container in exponents.axes[0].containers for patch in container)
    assert heights == pytest.approx(100.0)
    assert [axes.get_ylabel() for axes in shares.axes][2] == "SQNR (dB)"
    assert [len(axes.lines) for axes in shares.axes] == [5, 5, 5]
    with pytest.raises(ValueError, match="nothing was seen of a layer '1'; seen were '0', '2'"):
        monitor.plot_shares("1")
    with pytest.raises(ValueError, match="step 1 was not sampled with the layer '2'; sampled were 0, 2"):
        monitor.plot_exponents("2", 1)


def test_what_cannot_be_watched() -> None:
    with pytest.raises(TypeError, match=r"Monitor: model must be a torch.nn.Module, got 3"):
        Monitor(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Monitor: the model has no layer with points"):
        Monitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Monitor: every must lie in 1…"):
        Monitor(net(), every=0)
    with pytest.raises(TypeError, match=r"Monitor: optimizer must be a torch.optim.Optimizer, got 3"):
        Monitor(net(), optimizer=3)  # type: ignore[arg-type]
    model = net()
    with Monitor(model), pytest.raises(ValueError, match="Monitor: another monitor watches the model: close that one first"):
        Monitor(model)
    Monitor(model).close()


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for() -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(64, 32, device="cuda")
    monitor = Monitor(model, every=1, optimizer=optimizer)
    for number in range(6):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [sample.step for sample in monitor.samples] == list(range(6))
    monitor.close()


@pytest.mark.gpu
def test_capture_of_a_sampled_step_counts_nothing() -> None:
    model = net().cuda()
    x = torch.randn(64, 32, device="cuda")
    with Monitor(model) as monitor:
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        graph.replay()
        monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 64 * 32
