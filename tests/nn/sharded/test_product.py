"""Layers of distributed tensors, as created by tensor-parallel plans: they compute the same as the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import qsim
from qsim import FivePoint
from qsim.accumulators import Rounded
from qsim.random import seeds
from support.comparing import same_bits
from support.distributed_models import (
    NEAREST,
    NOISY,
    REUSED,
    alike,
    check,
    coarse,
    doubled,
    gradients,
    mesh_of,
    model,
    noisy,
    parallelized,
    place,
    rounded_alike,
    run,
    whole,
)
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two = ranks_of(2)


def _tensor_parallel(device: torch.device, sequence: bool, convert_last: bool) -> dict[str, Any]:
    mesh = mesh_of(device)
    reference = model(device, NEAREST, 36)
    net = parallelized(model(device, None if convert_last else NEAREST, 36), mesh, sequence)
    if convert_last:
        qsim.convert(net, NEAREST)
    x = coarse(3, 8, 16, seed=1).to(device)
    names = [name for name, _ in net.named_parameters()]
    placed = {name: str(parameter.placements) for name, parameter in net.named_parameters() if hasattr(parameter, "placements")}
    results = [run(each, x, 0) for each in (net, reference)]
    return {"results": results, "names": names, "placed": placed, "gradients": [gradients(net), gradients(reference)]}


@pytest.mark.parametrize(("sequence", "convert_last"), [(False, False), (False, True), (True, False)])
def test_tensor_parallel_plans(two: Ranks, sequence: bool, convert_last: bool) -> None:
    for seen in two(_tensor_parallel, sequence, convert_last):
        assert "Shard(dim=0)" in seen["placed"]["0.up.weight"]
        assert "Shard(dim=1)" in seen["placed"]["0.down.weight"]
        y, expected = seen["results"]
        assert same_bits(y, expected)
        for name, found, wanted in zip(seen["names"], *seen["gradients"], strict=True):
            check(name, found, wanted)


def _compiled(device: torch.device, points: FivePoint) -> list[list[Tensor]]:
    results = []
    for compiled in (True, False):
        torch.manual_seed(distributed.get_rank())  # each conversion draws a seed; rank 0's counts
        net = parallelized(model(device, points, 36)[:1], mesh_of(device), sequence=False)
        call = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        results.append([run(call, coarse(4, 16, seed=1).to(device), 0), *gradients(net)])
    return results


def test_a_plan_compiles(two: Ranks) -> None:
    for found, expected in two(_compiled, REUSED):
        assert len(found) == len(expected) == 7
        assert same_bits(found[0], expected[0])
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted)


def _doubled(device: torch.device, compiled: bool) -> list[Tensor]:
    layer = doubled(device, mesh_of(device))
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    return [call(torch.full((4, 16), 1.25, device=device)) for _ in range(2)]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_input_that_all_ranks_hold_rounds_alike_on_all(two: Ranks, compiled: bool) -> None:
    for first, second in two(_doubled, compiled):
        assert rounded_alike(first)
        assert rounded_alike(second)
        assert not same_bits(first, second), "every call draws again"


def _linear(
    device: torch.device, points: FivePoint, places: tuple[str, str], x: Tensor, w: Tensor, g: Tensor, bias: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor], str]:
    """The result and the gradients of a layer of distributed tensors, and of a layer of whole ones."""
    from torch.distributed.tensor import distribute_tensor

    from qsim.nn.sharded.shares import seed_of_shares

    given = [t.to(device) for t in (x, w, bias) if t is not None]
    placed = [*places, "0" if places[1] == "0" else "all"]
    mesh = mesh_of(device)
    shares = [distribute_tensor(t, mesh, [place(how)]).requires_grad_() for t, how in zip(given, placed, strict=False)]
    both = []
    for operands, seed in ((shares, 2 + distributed.get_rank()), ([t.requires_grad_() for t in given], 2)):
        torch.manual_seed(seed)
        y = qsim.nn.functional.linear(*operands, points=points, stream=3)
        getattr(y, "full_tensor", lambda y=y: y)().backward(g.to(device))
        both.append([whole(t) for t in (y, *(t.grad for t in operands if t.grad is not None))])
    found = seeds.weight_seed(given[1], 3), seed_of_shares(shares[1], 3)
    assert found[0] == found[1], "a weight's seed follows from the whole of it"
    return both[0], both[1], str(shares[0].placements)


LAYOUTS = [(x, w) for x in ("all", "0", "1", "2") for w in ("all", "0", "1")]


@pytest.mark.parametrize("places", LAYOUTS, ids=lambda places: "-".join(places))
def test_a_linear_layer_of_shares_is_that_of_the_whole(two: Ranks, places: tuple[str, str]) -> None:
    x, w, bias, g = coarse(3, 5, 18, seed=0), coarse(13, 18, seed=1), coarse(13, seed=2), coarse(3, 5, 13, seed=3)
    for found, expected, _ in two(_linear, NEAREST, places, x, w, g, bias):
        assert len(found) == 4
        assert alike(found, expected)


# The gradient's noise is that of the whole if the result is reduced, or replicated; the weight's if rows are whole.
ALL_BUT_GRAD = FivePoint(*[noisy("e2m1")] * 4, "e2m1")
ALL_BUT_WEIGHT = FivePoint(None, "e2m1", None, "same", noisy("e2m1"))


@pytest.mark.parametrize(
    ("places", "points"),
    [(("all", "all"), NOISY), (("all", "0"), ALL_BUT_GRAD), (("all", "0"), REUSED), (("2", "1"), ALL_BUT_WEIGHT)],
    ids=lambda given: "-".join(given) if isinstance(given, tuple) else "",
)
def test_replicated_tensors_round_identically_however_ranks_are_seeded(two: Ranks, places: tuple[str, str], points: FivePoint) -> None:
    x, w, g = coarse(3, 5, 18, seed=0), coarse(13, 18, seed=1), coarse(3, 5, 13, seed=3)
    (first, alone, _), (second, other, _) = two(_linear, points, places, x, w, g)
    assert alike(first, alone), "as the first rank rounds it alone"
    assert alike(first, second)
    assert alike(alone, other) == (points is REUSED), "where each is alone, only their weights round alike"


SUM = Rounded("bf16")


def _added(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """A product whose sums are computed in parts."""
    pieces = zip(a.chunk(parts, -1), b.chunk(parts, 0), strict=True)
    return torch.stack([qsim.matmul(one, other, SUM) for one, other in pieces]).sum(0)


@pytest.mark.parametrize(
    ("places", "parts"), [(("all", "0"), (1, 2, 1)), (("2", "1"), (2, 1, 1)), (("0", "all"), (1, 1, 2))], ids=lambda given: str(given[0])
)
def test_an_accumulator_adds_what_a_process_multiplies(two: Ranks, places: tuple[str, str], parts: tuple[int, int, int]) -> None:
    x, w, g = (torch.randn(shape) for shape in ((4, 5, 18), (12, 18), (4, 5, 12)))
    a, flat = x.view(-1, 18), g.view(-1, 12)
    expected = [_added(a, w.t(), parts[0]).view(4, 5, 12), _added(flat, w, parts[1]).view(x.shape), _added(flat.t(), a, parts[2])]
    for found, alone, _ in two(_linear, FivePoint(accumulate=SUM), places, x, w, g):
        assert alike(found, expected)
        assert not alike(alone, expected)


def test_sums_that_several_processes_compute_draw_the_same_bits(two: Ranks) -> None:
    x, w, g = torch.randn(1, 8, 18).repeat(2, 1, 1), torch.randn(12, 18), torch.randn(2, 8, 12)
    points = FivePoint(accumulate=Rounded("bf16", rounding="stochastic"))
    (first, alone, _), (second, _, _) = two(_linear, points, ("all", "all"), x, w, g)
    assert alike(first, alone)
    assert alike(first, second)
    (first, _, _), (second, _, _) = two(_linear, points, ("0", "all"), x, w, g)
    assert alike(first, second)
    assert not same_bits(*first[0]), "and others draw their own"


# Formats with scales that columns of a weight do not share, share with each other or share with rows, and one without scales.
CUT = [
    noisy("e2m1"),
    qsim.Quantizer("mxfp4", "stochastic"),
    qsim.Quantizer("nvfp4", "stochastic"),
    qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.Tensor()),
    qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.Channel(0)),
    qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.Channel(-1)),
]


def _cut_weights(device: torch.device, x: Tensor, w: Tensor, g: Tensor) -> list[list[Tensor]]:
    results = []
    for quantizer in CUT:
        points = FivePoint(None, quantizer, None, quantizer)
        found, expected, _ = _linear(device, points, ("2", "1"), x.clone(), w.clone(), g)
        results.append([*found, *expected])
    return results


def test_a_weight_in_columns_rounds_as_the_whole(two: Ranks) -> None:
    x, w, g = torch.eye(64).expand(2, 64, 64), coarse(16, 64, seed=1) / 3, torch.eye(16).repeat(2, 4, 1)
    for results in two(_cut_weights, x, w, g):
        for quantizer, found in zip(CUT, results, strict=True):
            y, grad_x, _, expected, expected_grad_x, _ = found
            assert same_bits(y, expected), quantizer
            assert same_bits(grad_x, expected_grad_x), quantizer


def test_inputs_and_gradients_have_noise_of_their_own(two: Ranks) -> None:
    def halves(points: FivePoint, places: tuple[str, str], x: Tensor, w: Tensor, g: Tensor, which: int) -> tuple[Tensor, Tensor]:
        (first, _, _), (second, _, _) = two(_linear, points, places, x, w, g)
        assert alike(first, second)
        assert set(first[which].unique().tolist()) == {1.0, 1.5}
        parts: tuple[Tensor, Tensor] = first[which].chunk(2, -1)
        return parts

    constant, eye = torch.full((16, 16), 1.25), torch.eye(16)
    assert not same_bits(*halves(FivePoint(act=noisy("e2m1")), ("1", "1"), constant, eye, eye, 0)), "an input in columns"
    assert not same_bits(*halves(FivePoint(grad=noisy("e2m1")), ("all", "0"), eye, eye, constant, 1)), "a gradient in columns"
    rows = halves(FivePoint(act=noisy("e2m1")), ("0", "all"), constant, eye, eye, 0)[0].T
    assert not same_bits(*rows.chunk(2, -1)), "an input in rows"


def _replicated_layer(device: torch.device) -> list[Tensor]:
    """A layer outside of the plan, which gets its whole input."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    mesh = mesh_of(device)
    layer = qsim.convert(nn.Linear(16, 16).to(device), NOISY)
    distribute_module(
        layer,
        mesh,
        input_fn=lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs),
        output_fn=lambda _, output, mesh: output.to_local(),
    )
    y = run(layer, coarse(4, 16, seed=1).to(device), distributed.get_rank())
    return [y, *gradients(layer)]


def test_a_replicated_layer_rounds_alike_on_all_ranks(two: Ranks) -> None:
    first, second = two(_replicated_layer)
    assert alike(first, second)


def _other_products(device: torch.device) -> list[tuple[list[Tensor], list[Tensor], str]]:
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(device)
    heads = [coarse(2, 4, 5, 6, seed=0), coarse(2, 4, 6, 5, seed=1)]
    image = [coarse(4, 3, 6, 6, seed=2), coarse(4, 3, 3, 3, seed=3), coarse(4, seed=4)]

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return qsim.nn.functional.matmul(a, b, NEAREST)

    def conv2d(*given: Tensor) -> Tensor:
        return qsim.nn.functional.conv2d(*given, points=NEAREST)

    cases: list[tuple[Callable[..., Tensor], list[Tensor], tuple[str, ...]]] = [
        (matmul, heads, ("1", "1")),
        (matmul, heads, ("0", "0")),
        (matmul, heads, ("2", "1")),
        (matmul, [heads[0], heads[1][0]], ("1", "0")),
        (matmul, [heads[0], heads[1][0, 0]], ("0", "all")),
        (conv2d, image, ("0", "all", "all")),
        (conv2d, image, ("1", "all", "all")),
    ]
    results = []
    for function, operands, places in cases:
        shares = [distribute_tensor(t.to(device), mesh, [place(how)]).requires_grad_() for t, how in zip(operands, places, strict=True)]
        alone = [t.to(device, copy=True).requires_grad_() for t in operands]
        y, expected = function(*shares), function(*alone)
        g = coarse(*expected.shape, seed=9).to(device)
        y.full_tensor().backward(g)  # type: ignore[attr-defined]
        expected.backward(g)
        found = [[whole(t) for t in (y, *(x.grad for x in given))] for y, given in ((y, shares), (expected, alone))]
        results.append((*found, str(y.placements)))  # type: ignore[attr-defined]
    return results


def test_other_products_of_shares(two: Ranks) -> None:
    for results in two(_other_products):
        assert len(results) == 7
        for found, expected, _ in results:
            # Convolutions may be computed by algorithms that are not exact.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert [placed.count("Shard") for _, _, placed in results] == [1, 1, 0, 1, 0, 1, 0]


def _heads(device: torch.device, second: bool) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    operands = [torch.full((4, 8, 8), 1.25), torch.eye(8).expand(4, 8, 8).contiguous()]
    shares = [distribute_tensor(t.to(device), mesh_of(device), [place("0")]) for t in (reversed(operands) if second else operands)]
    torch.manual_seed(0)
    return whole(qsim.nn.functional.matmul(*shares, points=FivePoint(act=noisy("e2m1"))))


@pytest.mark.parametrize("second", [False, True])
def test_heads_have_noise_of_their_own(two: Ranks, second: bool) -> None:
    first, other = two(_heads, second)
    assert same_bits(first, other)
    assert set(first.unique().tolist()) == {1.0, 1.5}
    assert not same_bits(*first.chunk(2))


def _lookup(device: torch.device, points: FivePoint, places: tuple[str, str], padding_idx: int | None) -> dict[str, Any]:
    from torch.distributed.tensor import distribute_tensor

    mesh, rank = mesh_of(device), distributed.get_rank()
    indices = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(0)).to(device)
    table, g = coarse(13, 10, seed=1).to(device), coarse(4, 6, 10, seed=2).to(device)
    x, shared = (distribute_tensor(t, mesh, [place(how)]) for t, how in zip((indices, table), places, strict=True))
    results = []
    for given, weight, seed in ((x, shared.requires_grad_(), 2 + rank), (indices, table.requires_grad_(), 2)):
        torch.manual_seed(seed)
        y = qsim.nn.functional.embedding(given, weight, padding_idx, points, stream=4)
        getattr(y, "full_tensor", lambda y=y: y)().backward(g)
        assert weight.grad is not None
        # A negative zero loses its sign when it is added to another rank's.
        results.append([whole(y) + 0.0, whole(weight.grad) + 0.0])
    return {"shared": results[0], "alone": results[1]}


@pytest.mark.parametrize("places", [("all", "0"), ("all", "1"), ("0", "all"), ("all", "all"), ("1", "0")], ids="-".join)
@pytest.mark.parametrize("padding_idx", [None, 2, 12])
def test_lookups_in_shares(two: Ranks, places: tuple[str, str], padding_idx: int | None) -> None:
    for seen in two(_lookup, FivePoint(weight="e2m1", grad="e2m1"), places, padding_idx):
        assert alike(seen["shared"], seen["alone"])


@pytest.mark.parametrize("places", [("all", "0"), ("all", "1"), ("all", "all")], ids="-".join)
def test_lookups_in_shares_with_an_accumulator(two: Ranks, places: tuple[str, str]) -> None:
    for seen in two(_lookup, FivePoint(grad="e2m1", accumulate=Rounded("e2m1", rounding="odd")), places, 2):
        assert alike(seen["shared"], seen["alone"])
    drawn = [seen["shared"] for seen in two(_lookup, FivePoint(accumulate=Rounded("e2m1", rounding="stochastic")), places, 2)]
    assert alike(*drawn)


@pytest.mark.parametrize("places", [("all", "0"), ("all", "all")], ids="-".join)
def test_lookups_in_shares_with_noise(two: Ranks, places: tuple[str, str]) -> None:
    first, second = two(_lookup, FivePoint(weight=noisy("e2m1"), grad=noisy("e2m1")), places, None)
    assert alike(first["shared"], first["alone"])
    assert alike(first["shared"], second["shared"])
    assert not same_bits(first["alone"][1], second["alone"][1])


def _embedding_in_a_plan(device: torch.device, convert_last: bool) -> list[list[Tensor]]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    points = FivePoint(act="e2m1", weight=noisy("e2m1"), weight_bwd="same", act_bwd="same", grad="e2m1")
    results = []
    for styled in (True, False):
        torch.manual_seed(distributed.get_rank())  # the conversion draws a seed; rank 0's counts
        net = nn.Sequential(nn.Embedding(14, 8), nn.Linear(8, 14)).to(device)
        with torch.no_grad():
            for i, parameter in enumerate(net.parameters()):
                parameter.copy_(coarse(*parameter.shape, seed=i))
        net = net if convert_last else qsim.convert(net, points, embeddings=True)
        if styled:
            gathered = ColwiseParallel(output_layouts=place("all"))
            parallelize_module(net, mesh_of(device), {"0": RowwiseParallel(input_layouts=place("all")), "1": gathered})
        net = qsim.convert(net, points, embeddings=True) if convert_last else net
        x = torch.arange(12, device=device).view(3, 4)
        results.append([run(net, x, 0), *gradients(net)])
    return results


@pytest.mark.parametrize("convert_last", [False, True])
def test_an_embedding_in_a_plan(two: Ranks, convert_last: bool) -> None:
    for found, expected in two(_embedding_in_a_plan, convert_last):
        assert len(found) == 4
        assert alike(found, expected)


def _refused(device: torch.device) -> list[str]:
    from torch.distributed.tensor import distribute_tensor

    mesh = mesh_of(device)
    x, w, kernel = coarse(4, 4, 6, seed=0).to(device), coarse(5, 6, seed=1).to(device), coarse(2, 4, 3, seed=2).to(device)
    shared_x, shared_w = distribute_tensor(x, mesh, [place("all")]), distribute_tensor(w, mesh, [place("0")])
    shared_kernel = distribute_tensor(kernel, mesh, [place("0")])
    indices = torch.zeros(3, dtype=torch.int64, device=device)
    shared_indices = distribute_tensor(indices, mesh, [place("all")])
    few = distribute_tensor(w[:1].clone(), mesh, [place("0")])
    calls: list[Callable[[], Tensor]] = [
        lambda: qsim.nn.functional.linear(x, shared_w, None, NEAREST),
        lambda: qsim.nn.functional.linear(shared_x, w, None, NEAREST),
        lambda: qsim.nn.functional.linear(shared_x, shared_w, w[:, 0], NEAREST),
        lambda: qsim.nn.functional.conv1d(shared_x, shared_kernel, points=NEAREST),
        lambda: qsim.nn.functional.embedding(indices, shared_w, points=NEAREST),
        lambda: qsim.nn.functional.embedding(shared_indices, shared_w, points=NEAREST, scale_grad_by_freq=True),
        lambda: qsim.nn.functional.embedding(shared_indices, few, points=NEAREST),
    ]
    said = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        said.append(f"{type(error.value).__name__}: {error.value}")
    return said


def test_unsupported_placements_raise_clear_errors(two: Ranks) -> None:
    for said in two(_refused):
        mixed = "TypeError: the operands of a product must be all distributed tensors or none, got "
        assert said[:3] == [mixed + "Tensor, DTensor", mixed + "DTensor, Tensor", mixed + "DTensor, DTensor, Tensor"]
        assert said[3].startswith("ValueError: convolution: a weight must be placed Replicate(), got S")
        assert said[4] == "TypeError: embedding: indices and table must both be distributed tensors or none, got Tensor and DTensor"
        assert said[5] == "ValueError: embedding: scale_grad_by_freq cannot be combined with a table that is distributed by rows"
        assert said[6] == "ValueError: embedding: a table of 1 rows leaves some of 2 processes none"
