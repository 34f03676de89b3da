"""Linear layers of distributed tensors: they compute the same as the layer of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import qsim
from qsim import FivePoint
from qsim.accumulators import Rounded
from qsim.random import seeds
from support.comparing import same_bits
from support.distributed_models import NEAREST, NOISY, REUSED, alike, coarse, mesh_of, noisy, place, whole
from support.draws import Place, Recorder, Use, recorded
from support.points import in_order
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

pytestmark = NEEDS_GLOO
two = ranks_of(2)


def _linear(
    device: torch.device, points: FivePoint, places: tuple[str, str], x: Tensor, w: Tensor, g: Tensor, bias: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor], str]:
    """The result and the gradients of a layer of distributed tensors, and of a layer of whole ones."""
    from torch.distributed.tensor import distribute_tensor

    from qsim.nn.sharded.product import seed_of_shares

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
ALL_BUT_GRAD = in_order(*[noisy("e2m1")] * 4, "e2m1")

ALL_BUT_WEIGHT = FivePoint(None, "e2m1", act_bwd=None, weight_bwd="same", grad=noisy("e2m1"))


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


def _draws(device: torch.device, places: tuple[str, str], points: FivePoint) -> dict[Place, Use]:
    """The draws of a process in a step of a layer of distributed tensors."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    x, w, g = torch.randn(6, 8), torch.randn(10, 8), torch.randn(6, 10)
    shards = [distribute_tensor(t, mesh_of(device), [place(how)]).requires_grad_() for t, how in zip((x, w), places, strict=True)]
    with recorded() as draws:
        y: Any = qsim.nn.functional.linear(*shards, points=points, stream=3)
        y.full_tensor().backward(g.to(device))
    draws.check()
    return draws.uses


@pytest.mark.parametrize("places", [("1", "1"), ("0", "all"), ("all", "0")], ids="-".join)
def test_numbers_of_two_processes_share_no_bits(two: Ranks, places: tuple[str, str]) -> None:
    """Shards of a result, or summands of it, whose numbers differ."""
    both = Recorder()
    for uses in two(_draws, places, FivePoint(grad=noisy("e4m3"), accumulate=Rounded("e5m2", rounding="stochastic"))):
        both.add(uses)
    both.check()


# Formats with scales that columns of a weight do not share, share with each other or share with rows, and one without scales.
CUT = [
    noisy("e2m1"),
    qsim.Quantizer("mxfp4", "stochastic"),
    qsim.Quantizer("nvfp4", "stochastic"),
    qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.PerTensor()),
    qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.PerRow()),
    qsim.Quantizer("e4m3", "stochastic", scale=qsim.scaling.PerAxis(-1)),
]


def _cut_weights(device: torch.device, x: Tensor, w: Tensor, g: Tensor) -> list[list[Tensor]]:
    results = []
    for quantizer in CUT:
        points = FivePoint(None, quantizer, act_bwd=None, weight_bwd=quantizer)
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
    assert not same_bits(*halves(FivePoint(act=noisy("e2m1"), act_bwd=None), ("1", "1"), constant, eye, eye, 0)), "an input in columns"
    assert not same_bits(*halves(FivePoint(grad=noisy("e2m1")), ("all", "0"), eye, eye, constant, 1)), "a gradient in columns"
    rows = halves(FivePoint(act=noisy("e2m1"), act_bwd=None), ("0", "all"), constant, eye, eye, 0)[0].T
    assert not same_bits(*rows.chunk(2, -1)), "an input in rows"
