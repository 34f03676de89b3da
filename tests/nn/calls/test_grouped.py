"""Grouped products, plain, under scales, after transforms and with accumulators: all groups at once, as one after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.nn import functional
from qsim.nn.calls import products
from qsim.nn.product import grouped
from qsim.scaling import Delayed, PerBlock, PerRow
from support.comparing import same_bits
from support.multiplying import NEAREST, Calls, inputs, made, results, rounded
from support.roundings import nearest

RECIPES = {
    **{name: nearest(qsim.recipes.resolve(name).points) for name in ("fp8_hybrid", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4", "int8")},
    "rows": qsim.recipes.fp8_hybrid(PerRow()).points,
    "accumulated": qsim.recipes.fp8_hybrid().with_(accumulate="h100_fp8").points,
    "accumulated, rows": qsim.recipes.fp8_hybrid(PerRow()).with_(accumulate="h100_fp8").points,
    "accumulated, blocks": nearest(qsim.recipes.deepseek_v3().points),
    "accumulated, plain": FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e5m2", accumulate="h100_fp8"),
}
ENDS = [(5, 5, 40, 70), (0, 0, 0, 70), (33, 34, 50, 65), (0, 0, 0, 0)]
GROUPED_MM = getattr(F, "grouped_mm", torch._grouped_mm)


class Experts(nn.Module):
    """A stack of matrices, stored as layers store weights, or transposed."""

    def __init__(self, *, as_layers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.as_layers, self.stack = as_layers, nn.Parameter(torch.randn(4, 24, 32) if as_layers else torch.randn(4, 32, 24))

    def forward(self, x: Tensor, ends: Tensor | None) -> Tensor:
        return GROUPED_MM(x, self.stack.mT if self.as_layers else self.stack, offs=ends)  # type: ignore[no-any-return]


def results_of_groups(call: Callable[[Tensor], Tensor], model: Any, rows: int) -> list[Tensor]:
    """The results of the rows that are in groups, and all gradients."""
    x = (torch.randn(70, 32, generator=torch.Generator().manual_seed(1)) * torch.arange(1.0, 71.0).unsqueeze(1)).requires_grad_()
    y = call(x)[:rows]
    g = torch.randn(rows, 24, generator=torch.Generator().manual_seed(2))
    of_x, of_stack = torch.autograd.grad(y, [x, model.stack], g)
    return [y.detach(), of_x[:rows], of_stack]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", RECIPES)
def test_all_groups_at_once_have_the_bits_of_one_after_another(name: str, ends: tuple[int, ...]) -> None:
    for as_layers in (True, False):
        check(qsim.convert(Experts(as_layers=as_layers), RECIPES[name]), RECIPES[name], ends)


@pytest.mark.parametrize("name", ["fp8_hybrid", "rows", "accumulated"])
def test_rows_after_the_last_group_are_zero(name: str) -> None:
    model = qsim.convert(Experts(as_layers=True), RECIPES[name])
    for ends in ((5, 5, 40, 60), (0, 0, 0, 0)):
        y = model(torch.randn(70, 32), torch.tensor(ends, dtype=torch.int32))
        assert not y[ends[-1] :].any()
        assert bool(y[: ends[-1]].all())


@pytest.mark.parametrize("as_layers", [True, False])
def test_stacks_of_stochastic_weights_are_rounded_as_they_are_stored(as_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = qsim.convert(Experts(as_layers=as_layers), qsim.recipes.resolve("mxfp4").points)
    rounded_as, own = [], products.planned

    def planned(a: Tensor, w: Tensor, *rest: Any) -> Tensor:
        rounded_as.append(w.is_contiguous())
        return own(a, w, *rest)

    monkeypatch.setattr(products, "planned", planned)
    results_of_groups(lambda x: model(x, torch.tensor(ENDS[0], dtype=torch.int32)), model, 70)
    assert rounded_as == [True], "a transpose would be copied, for the checksum and to be rounded"


def check(model: Any, points: FivePoint, ends: tuple[int, ...]) -> None:
    def written_out(x: Tensor) -> Tensor:
        weights = model.stack if model.as_layers else model.stack.mT
        parts = zip((0, *ends[:-1]), ends, weights, strict=True)
        return torch.cat([functional.linear(x[start:end], w, None, points) for start, end, w in parts])

    own = results_of_groups(lambda x: model(x, torch.tensor(ends, dtype=torch.int32)), model, ends[-1])
    assert all(map(same_bits, own, results_of_groups(written_out, model, ends[-1])))


def in_parts(x: Tensor, ends: tuple[int, ...]) -> list[Tensor]:
    """The rows of each group."""
    return [x[start:end] for start, end in zip((0, *ends[:-1]), ends, strict=True)]


def named(name: str) -> FivePoint:
    """The points of a named recipe. Callables keep their random bits, whose streams `streams_of_groups` records."""
    return nearest(qsim.recipes.resolve(name, "e4m3").points)


#: Recipes under which numbers below the format's range are zero, in groups as elsewhere.
UNSCALED = ("hfp8", "luq", "stochastic_backward", "weight_only", "nearest_everywhere")


@pytest.fixture
def streams_of_groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams of groups that are multiplied one after the other."""
    streams, own = [], products.times_weight

    def noted(a: Tensor, w: Tensor, given: Any) -> Tensor:
        streams.append(given.stream)
        return own(a, w, given)

    monkeypatch.setattr(products, "times_weight", noted)
    return streams


@pytest.mark.parametrize("layout", ["rows", "batch"])
@pytest.mark.parametrize("name", qsim.recipes.NAMED)
def test_every_recipe_rounds_each_group_by_itself(name: str, layout: str, streams_of_groups: list[Any]) -> None:
    """The second group is so small that it would be zero under the scale of the first; its gradients are, too."""
    points, ends = named(name), (24, 48, 72)
    model: Any = qsim.convert(Experts(as_layers=True), points)
    x, g = (torch.randn(72, size, generator=torch.Generator().manual_seed(size)) for size in (32, 24))
    x[24:48] *= 1e-7
    g[24:48] *= 1e-7
    x.requires_grad_()
    offs = torch.tensor((*ends, 72), dtype=torch.int32)

    def gradients(call: Callable[[], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        y = call()
        return [y.detach(), *torch.autograd.grad(y, [x, model.stack], g)]

    def all_at_once() -> Tensor:
        if layout == "rows":
            return model(x, offs)  # type: ignore[no-any-return]
        return model(F.pad(x.view(3, 24, 32), (0, 0, 0, 0, 0, 1)), None)[:3].flatten(0, 1)  # type: ignore[no-any-return]

    def one_by_one() -> Tensor:
        streams = streams_of_groups or [0] * 4
        return torch.cat(
            [
                functional.linear(rows, w, None, points, stream=stream)
                for rows, w, stream in zip(in_parts(x, ends), model.stack, streams, strict=False)
            ]
        )

    y, of_x, of_stack = gradients(all_at_once)
    assert all(map(same_bits, (y, of_x, of_stack), gradients(one_by_one)))
    with torch.no_grad():
        exact = torch.cat([rows @ w.mT for rows, w in zip(in_parts(x, ends), model.stack, strict=False)])
        exact_of_x = torch.cat([rows @ w for rows, w in zip(in_parts(g, ends), model.stack, strict=False)])
        exact_of_stack = torch.stack([of_y.mT @ rows for of_y, rows in zip(in_parts(g, ends), in_parts(x, ends), strict=True)])
    if name not in ("lsq", *UNSCALED):  # all groups share the step that a module learns
        for own, expected in ((y[24:48], exact[24:48]), (of_x[24:48], exact_of_x[24:48]), (of_stack[1], exact_of_stack[1])):
            assert F.cosine_similarity(own.flatten(), expected.flatten(), dim=0, eps=0) > 0.5


def test_one_scale_of_a_result_belongs_to_its_group() -> None:
    points = FivePoint(output=Quantizer("e4m3", scale="tensor"))
    model: Any = qsim.convert(Experts(as_layers=True), points)
    x = torch.randn(70, 32)
    x[40:] *= 1e-7
    y = model(x, torch.tensor([5, 5, 40, 70], dtype=torch.int32))
    assert same_bits(y[40:], functional.linear(x[40:], model.stack[3], None, points))
    assert (y[40:] != 0).all()


def test_callables_get_each_group_that_has_rows() -> None:
    """Empty groups have no largest magnitude."""
    seen = []

    def scaled(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x / x.abs().max() * x.abs().max()

    model: Any = qsim.convert(Experts(as_layers=True), FivePoint(act=scaled, grad=scaled))
    x = torch.randn(70, 32, requires_grad=True)
    model(x, torch.tensor([5, 5, 40, 66], dtype=torch.int32)).sum().backward()
    assert seen == [(5, 32), (35, 32), (26, 32), *seen[3:]]
    assert sorted(seen[3:]) == [(5, 24), (26, 24), (35, 24)]
    assert x.grad is not None
    assert torch.equal(x.grad[66:], torch.zeros(4, 32))


def test_delayed_scales_next_to_a_callable_are_refused() -> None:
    model = qsim.convert(Experts(as_layers=True), FivePoint(act=torch.sign, weight=Quantizer("e4m3", scale=Delayed(4)), weight_bwd=None))
    with pytest.raises(ValueError, match=r"a callable or a module rounds group by group, .* or round by a format or a Quantizer"):
        model(torch.randn(70, 32), torch.tensor(ENDS[0], dtype=torch.int32))


@pytest.mark.parametrize("name", ["fp8_hybrid", "accumulated", "accumulated, blocks"])
def test_every_product_is_reported_as_rounded(name: str) -> None:
    model = qsim.convert(Experts(as_layers=True), RECIPES[name])
    assert qsim.coverage(model, (torch.randn(70, 32), torch.tensor(ENDS[0], dtype=torch.int32))).share == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_hybrid", "nvfp4"])
def test_compiled_code_has_no_breaks_and_the_same_bits(name: str) -> None:
    model = qsim.convert(Experts(as_layers=True), RECIPES[name])
    compiled, ends = torch.compile(model, backend="aot_eager", fullgraph=True), torch.tensor(ENDS[0], dtype=torch.int32)
    own, expected = (results_of_groups(lambda x, call=call: call(x, ends), model, ENDS[0][-1]) for call in (compiled, model))
    assert all(map(same_bits, own, expected))


def test_random_sums_of_groups_differ() -> None:
    """Groups of equal rows and equal matrices: they would have equal sums if they had the random bits of the same indices."""
    noisy = qsim.accumulators.Rounded("e5m2", rounding="stochastic")
    model: Any = qsim.convert(Experts(as_layers=True), FivePoint("e4m3", "e4m3", accumulate=noisy, act_bwd=None, weight_bwd=None))
    with torch.no_grad():
        model.stack.copy_(model.stack[0].clone())
    x = torch.randn(35, 32).repeat(2, 1)
    y = model(x, torch.tensor([35, 35, 70, 70], dtype=torch.int32))
    exact = qsim.quantize(x[:35], "e4m3") @ qsim.quantize(model.stack[0].detach(), "e4m3").mT
    errors = torch.stack([(y[:35] - exact).flatten(), (y[35:] - exact).flatten()]).detach()
    # The errors of 32 additions with two mantissa bits, each at most a quarter of what has been added so far.
    assert (errors.square().mean(1).sqrt() < exact.std()).all()
    assert (errors.mean(1).abs() < 6 * errors.std(1) / math.sqrt(exact.numel())).all()
    assert abs(torch.corrcoef(errors)[0, 1]) < 6 / math.sqrt(exact.numel())


@pytest.mark.parametrize("accumulate", [None, "h100_fp8"])
def test_delayed_scales_record_a_product_once(accumulate: str | None) -> None:
    model: Any = qsim.convert(Experts(as_layers=True), qsim.recipes.fp8_hybrid(Delayed(4)).with_(accumulate=accumulate))
    for i in range(2):
        x = torch.full((70, 32), 3.0 + i)
        x[66:] = 1e9  # in no group
        model(x, torch.tensor([5, 5, 40, 66], dtype=torch.int32)).sum().backward()
    assert model.stack_act_recorded == model.stack_weight_recorded == model.stack_grad_recorded == 2
    assert model.stack_act_amaxes.tolist() == [3.0, 4.0, 0.0, 0.0]
    assert model.stack_weight_amaxes[0] == model.stack.abs().max()


def test_delayed_scales_next_to_blocks_that_an_accumulator_adds_under_are_refused() -> None:
    blocks, delayed = Quantizer("e4m3", scale=PerBlock(16)), Quantizer("e4m3", scale=Delayed(4))
    model = qsim.convert(
        Experts(as_layers=True), FivePoint(act=blocks, weight=delayed, accumulate="h100_fp8", act_bwd=None, weight_bwd=None)
    )
    with pytest.raises(ValueError, match=r"in grouped products, an accumulator adds .* give this point another scale, or omit the accumul"):
        model(torch.randn(70, 32), torch.tensor(ENDS[0], dtype=torch.int32))
    assert model.stack_weight_recorded == 0


def test_a_monitor_divides_elements_by_the_scales_of_their_groups() -> None:
    """Every group is one number, which its scale maps to the format's largest; under a common scale the small ones would vanish."""
    model = qsim.convert(Experts(as_layers=True), FivePoint(act=Quantizer("e4m3", scale=scaling.PerTensor()), act_bwd=None))
    x = torch.ones(70, 32)
    x[:5], x[5:40] = 1e-6, 1e6
    with qsim.diagnostics.Monitor(model) as monitor:
        model(x, torch.tensor(ENDS[0], dtype=torch.int32))
        monitor.step()
    counts = monitor.samples[0]["stack", "act"]
    assert (counts.elements, counts.saturated, counts.underflowed, counts.zero) == (70 * 32, 0, 0, 0)
    assert counts.histogram.tolist() == [70 * 32]  # all in the binade of 448
    assert counts.noise < 1e-12 * counts.signal


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_hybrid", "rows", "nvfp4"])
def test_large_groups_are_multiplied_by_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads the ends of the groups for them, which torch would report in the other case. Sums may have other orders."""
    model: Any = qsim.convert(Experts(as_layers=True).cuda().bfloat16(), RECIPES[name])
    x, g = (torch.randn(70, size, device="cuda", dtype=torch.bfloat16) for size in (32, 24))
    ends = torch.tensor([5, 5, 40, 70], dtype=torch.int32, device="cuda")

    def of_all() -> list[Tensor]:
        given = x.clone().requires_grad_()
        y = model(given, ends)
        return [y.detach(), *torch.autograd.grad(y, [given, model.stack], g)]

    small = of_all()
    monkeypatch.setattr(grouped, "_LONG", 0)
    for a, b in zip(of_all(), small, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            of_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ends", [(2, 2, 7), (3, 5, 6)])
def test_grouped_products_are_a_product_for_each_group(ends: tuple[int, ...]) -> None:
    """The second group of the first case has no rows. The last row of the second case is in no group: it has no result, nor a gradient."""
    offs = torch.tensor(ends, dtype=torch.int32)
    function = getattr(F, "grouped_mm", torch._grouped_mm)
    torch.manual_seed(0)
    model: Any = Calls(lambda m, x: function(x, m.stack.mT, offs=offs)[: ends[-1]])
    model.stack = nn.Parameter(torch.randn(3, 8, 16))
    qsim.convert(model, NEAREST)

    def written_out(x: Tensor) -> Tensor:
        starts = (0, *ends[:-1])
        return torch.cat([rounded(x[a:b], w) for a, b, w in zip(starts, ends, model.stack, strict=True)])

    (y, of_x, of_w), expected = (results(of, model, inputs(7, 16)) for of in (model, written_out))
    own = y, of_x[: ends[-1]], of_w
    assert all(torch.allclose(a, b[: len(a)], rtol=1e-6, atol=1e-6) for a, b in zip(own, expected, strict=True))
    assert qsim.coverage(model, inputs(7, 16)).share == 1


def test_groups_of_equal_size_are_a_batch_of_matrices() -> None:
    torch.manual_seed(0)
    model: Any = Calls(lambda m, x: GROUPED_MM(x, m.stack.mT))
    model.stack = nn.Parameter(torch.randn(3, 8, 16))
    qsim.convert(model, NEAREST)
    own, expected = (results(of, model, inputs(3, 5, 16)) for of in (model, lambda x: torch.stack(list(map(rounded, x, model.stack)))))
    assert all(map(same_bits, own, expected))


def test_grouped_products_have_one_dtype_under_autocast() -> None:
    """Whether groups have scales of their own, and are multiplied one by one, or not."""
    offs, found = torch.tensor([3, 5, 6], dtype=torch.int32), set()
    for points in (NEAREST, FivePoint(weight=Quantizer("e4m3", scale=scaling.PerBlock(8)), weight_bwd=None)):
        model: Any = Calls(lambda m, x: torch._grouped_mm(x, m.stack.mT, offs))
        model.stack = nn.Parameter(torch.randn(3, 8, 16))
        with torch.autocast("cpu", torch.bfloat16):
            found.add(qsim.convert(model, points)(inputs(7, 16)).dtype)
    assert found == {torch.bfloat16}


def test_ends_of_groups_that_are_no_integers_are_refused_by_torch() -> None:
    model: Any = Calls(lambda m, x: torch._grouped_mm(x, m.stack.mT, offs=torch.tensor([3.0, 7.0])))
    model.stack = nn.Parameter(torch.randn(2, 8, 16).bfloat16())
    with pytest.raises(RuntimeError, match="int32"):
        qsim.convert(model, NEAREST)(inputs(7, 16).bfloat16())


def test_torch_learns_of_grouped_products_once() -> None:
    made(lambda m, x: x)
    made(lambda m, x: x)
    assert torch.overrides.get_overridable_functions()[torch].count(torch._grouped_mm) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nearest_everywhere('e4m3')", "fp8_hybrid", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4", "int8"])
def test_the_host_does_not_wait_for_the_ends_of_groups(recipe: str) -> None:
    """Torch raises an error where the host waits for the GPU. Sums in another order differ in the last bits of bfloat16."""
    torch.manual_seed(0)
    points = nearest(qsim.recipes.resolve(recipe).points)
    model: Any = Calls(lambda m, x: torch._grouped_mm(x, m.stack.mT, offs=m.ends))
    model.stack = nn.Parameter(torch.randn(3, 32, 64))
    model.ends = torch.tensor([20, 20, 56], dtype=torch.int32, device="cuda")
    qsim.convert(model.cuda().bfloat16(), points)
    x = inputs(56, 64).detach().cuda().bfloat16().requires_grad_()
    g = torch.randn(56, 32, device="cuda", dtype=torch.bfloat16)

    def results(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(x)
        return [y.detach(), *torch.autograd.grad(y, [x, model.stack], g)]

    results(model)  # the first call compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        own = results(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    groups = ((0, 20), (20, 20), (20, 56))
    expected = results(
        lambda x: torch.cat([functional.linear(x[a:b], w, None, points) for (a, b), w in zip(groups, model.stack, strict=True)])
    )
    for a, b in zip(own, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


def test_compiled_code_rounds_grouped_products() -> None:
    """Compilers ask function modes about documented functions only, of which these are none."""
    offs, x = torch.tensor([3, 7], dtype=torch.int32), inputs(7, 16).bfloat16()
    torch.manual_seed(0)
    model: Any = Calls(lambda m, x: torch._grouped_mm(x, m.stack.mT, offs=offs))
    model.stack = nn.Parameter(torch.randn(2, 8, 16).bfloat16())
    own = qsim.convert(model, NEAREST)(x)
    assert same_bits(torch.compile(model, backend="eager")(x), own)
