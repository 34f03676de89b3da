"""The five points as a value: construction, comparison, printing, and round trips through configurations."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
import torch

import qsim
from qsim import FivePoint, Fixed, Float, Int, PowerOfTwo, Quantizer, Stochastic, scaling
from qsim.formats import E2M1, E4M3, E5M2, Format
from qsim.functional.quantizer import is_stochastic
from qsim.rounding import NAMED as ROUNDINGS
from support.catalogue import NAMED, VARIETY

POINTS = ("act", "weight", "act_bwd", "weight_bwd", "grad", "grad_w")
#: The published recipe: weights rounded to nearest in both passes, full-precision activations forward, the backward pass stochastic.
RECIPE = FivePoint(
    weight=E2M1, weight_bwd="same", act_bwd=Quantizer(E4M3, Stochastic(bits=6, correction=True)), grad=Quantizer(E5M2, "stochastic")
)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("given", ["e4m3", E4M3, torch.float8_e4m3fn, "Float(4, 3, specials='fn')", Quantizer(E4M3)], ids=repr)
def test_a_point_is_whatever_names_a_format(point: str, given: Any) -> None:
    # grad_w requires grad.
    others = {"grad": None} if point != "grad_w" else {"grad": "e5m2"}
    points = FivePoint(**{**others, point: given})
    assert getattr(points, point) == Quantizer(E4M3, overflow="nonfinite" if point in ("grad", "grad_w") else None)
    assert [name for name in POINTS if getattr(points, name) is not None] == [name for name in POINTS if name == point or others.get(name)]


def test_positions_are_those_of_the_algorithms() -> None:
    points = FivePoint("int8", "int4", "e4m3", "e3m2", "e5m2", "e2m1")
    expected = [Int(8), Int(4), E4M3, qsim.format("e3m2"), E5M2, E2M1]
    assert [getattr(points, name).format for name in POINTS] == expected


def test_gradients_without_a_scale_overflow() -> None:
    for given in ("e5m2", "e2m1", Quantizer("e4m3", "stochastic"), Quantizer("int8")):
        points = FivePoint(given, given, given, given, given, given)
        assert [getattr(points, name).usual_overflow for name in POINTS] == ["saturate"] * 4 + ["nonfinite"] * 2
        assert str(points).count("nonfinite") == 0, "it is the usual thing"
    for given in (Quantizer("e5m2", overflow="saturate"), "mxfp8", Quantizer("e4m3", scale="tensor")):
        assert FivePoint(grad=given).grad.usual_overflow == "saturate"
    assert str(FivePoint(grad=Quantizer("e5m2", overflow="saturate"))) == "grad=e5m2 saturate"
    assert qsim.nn.Quantize("e5m2", "e5m2").backward_point.overflow == "nonfinite"
    assert repr(qsim.nn.Quantize("e5m2", "e5m2")) == "Quantize(forward=e5m2, backward=e5m2)"
    assert FivePoint.from_dict({"grad": {"format": "e5m2", "overflow": "saturate"}}).grad.overflow == "saturate"


def test_a_quantizer_is_kept_with_all_that_it_says() -> None:
    spec = Quantizer(Float(4, 1), Stochastic(bits=3), overflow="nonfinite", clip_gradient=True)
    assert FivePoint(act=spec).act is spec


def test_nothing_given_is_the_identity() -> None:
    assert FivePoint().is_identity
    assert FivePoint() == FivePoint(None, None, None, None, None, None)
    assert not any(FivePoint(**{name: "e4m3"}).is_identity for name in POINTS[:5])
    assert FivePoint(act_bwd="same", weight_bwd="same").is_identity, "the same as nothing"
    assert not FivePoint(act="e4m3", act_bwd="same").is_identity


def test_are_values() -> None:
    twin = FivePoint.from_json(RECIPE.to_json())
    assert twin == RECIPE
    assert hash(twin) == hash(RECIPE)
    assert len({RECIPE, twin, FivePoint()}) == 2
    assert dataclasses.replace(RECIPE, grad=None) != RECIPE
    assert dataclasses.replace(RECIPE, act="e4m3").act == Quantizer(E4M3)
    assert copy.deepcopy(RECIPE) == RECIPE
    assert pickle.loads(pickle.dumps(RECIPE)) == RECIPE
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPE.act = None  # type: ignore[misc]


def test_copies_know_what_follows_from_their_points_and_no_plans() -> None:
    layer = qsim.nn.Linear(4, 2, points=RECIPE)
    layer(torch.ones(3, 4)).sum().backward()
    assert layer.points.plans
    for points in (copy.deepcopy(layer.points), pickle.loads(pickle.dumps(layer.points))):
        assert not points.plans
        for fact in ("is_identity", "is_stochastic", "weight_is_stochastic", "is_scaled", "is_delayed"):
            assert getattr(points, fact) == getattr(RECIPE, fact)


def test_old_pickles_without_these_attributes_get_them() -> None:
    points, point = FivePoint.__new__(FivePoint), Quantizer.__new__(Quantizer)
    points.__setstate__({field.name: getattr(RECIPE, field.name) for field in dataclasses.fields(FivePoint)})
    noisy = Quantizer("e5m2", "stochastic")
    point.__setstate__({field.name: getattr(noisy, field.name) for field in dataclasses.fields(Quantizer)})
    assert (points, points.is_identity) == (RECIPE, False)
    assert (point, point.spelt) == (noisy, noisy.spelt)


@pytest.mark.parametrize("point", POINTS)
def test_points_that_draw_are_recognized(point: str) -> None:
    first = {"grad": "e5m2"} if point == "grad_w" else {}
    for rounding in ("nearest", "up", "odd", "stochastic", Stochastic(bits=2)):
        points = FivePoint(**{**first, point: Quantizer(E4M3, rounding)})
        draws = rounding not in ("nearest", "up", "odd")
        assert points.weight_is_stochastic == (draws and point.startswith("weight"))
        assert points.is_stochastic == (draws and not point.startswith("weight"))
    assert not is_stochastic(None)
    assert not is_stochastic("same")


def test_same_draws_nothing_of_its_own() -> None:
    assert not FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same").is_stochastic
    assert FivePoint(act=Quantizer("e4m3", "stochastic"), act_bwd="same").is_stochastic


@pytest.mark.parametrize("fmt", [*NAMED, *VARIETY, Float(4, 1, bias=9, subnormals=False), Float(5, 2, bias=-3, specials="fnuz")], ids=repr)
def test_every_format_survives_a_configuration(fmt: Format) -> None:
    points = FivePoint(act=fmt, act_bwd=Quantizer(fmt, "stochastic"), weight=fmt, weight_bwd="same", grad=fmt, grad_w=fmt)
    check_round_trip(points)


@pytest.mark.parametrize(
    "rounding", [*ROUNDINGS, Stochastic(bits=6, correction=True), Stochastic(bits=1), Stochastic(correction=True)], ids=repr
)
@pytest.mark.parametrize("overflow", ["saturate", "nonfinite"])
@pytest.mark.parametrize("clip", [False, True])
def test_every_rounding_survives_a_configuration(rounding: Any, overflow: Any, clip: bool) -> None:
    act = Quantizer(Fixed(6, -3), rounding, overflow=overflow, clip_gradient=clip)
    check_round_trip(FivePoint(act=act, grad=Quantizer(PowerOfTwo(5, bias=20), rounding)))


def check_round_trip(points: FivePoint) -> None:
    """Compare points with those from a dictionary and from JSON, and the dictionary with plain JSON."""
    plain = points.to_dict()
    assert json.loads(json.dumps(plain)) == plain, "strings, booleans and dictionaries only"
    assert FivePoint.from_dict(plain) == points
    assert FivePoint.from_json(points.to_json()) == points


def test_dictionary_in_full() -> None:
    assert FivePoint().to_dict() == {}
    assert FivePoint(
        weight="e2m1", weight_bwd="same", grad=Quantizer(Float(4, 1, bias=9, subnormals=False), Stochastic(6, True))
    ).to_dict() == {
        "weight": {"format": "e2m1", "rounding": "nearest", "clip_gradient": False},
        "weight_bwd": "same",
        "grad": {
            "format": "Float(4, 1, bias=9, subnormals=False)",
            "rounding": "Stochastic(bits=6, correction=True)",
            "overflow": "nonfinite",
            "clip_gradient": False,
        },
    }


def test_a_configuration_may_be_short() -> None:
    written = '{"act": "e4m3", "act_bwd": "same", "grad": {"format": "e5m2", "rounding": "stochastic"}, "weight": null}'
    assert FivePoint.from_json(written) == FivePoint(act="e4m3", act_bwd="same", grad=Quantizer("e5m2", "stochastic"))


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (FivePoint(), "identity"),
        (FivePoint(act="e4m3"), "act=e4m3"),
        (FivePoint(act="e4m3", weight=Int(4), act_bwd="same"), "act=e4m3, weight=int4, act_bwd=same"),
        (RECIPE, "weight=e2m1, act_bwd=e4m3 Stochastic(bits=6, correction=True), weight_bwd=same, grad=e5m2 Stochastic()"),
        (
            FivePoint(grad=Quantizer(Float(4, 1, bias=9), "up", overflow="saturate", clip_gradient=True)),
            "grad=Float(4, 1, bias=9) up saturate clip_gradient",
        ),
    ],
)
def test_prints_in_short(points: FivePoint, text: str) -> None:
    assert str(points) == text


def test_repr_makes_it_again() -> None:
    names = {"FivePoint": FivePoint, "Quantizer": Quantizer, "Float": Float, "Stochastic": Stochastic, "NEAREST": qsim.rounding.NEAREST}
    assert eval(repr(RECIPE), names) == RECIPE


@pytest.mark.parametrize("point", ["act", "weight", "grad", "grad_w"])
def test_same_needs_something_to_be_the_same_as(point: str) -> None:
    with pytest.raises(ValueError, match=f'FivePoint: {point}="same" has no forward tensor to reuse; only act_bwd and weight_bwd'):
        FivePoint(**{point: "same"})  # type: ignore[arg-type]


def test_the_second_gradient_needs_the_first() -> None:
    with pytest.raises(ValueError, match="grad_w is the second product's own gradient quantizer and needs grad"):
        FivePoint(grad_w="e5m2")


def test_unknown_points_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="FivePoint has no point 'weights'; its points are act, weight, act_bwd, weight_bwd, grad, grad_w"):
        FivePoint.from_dict({"weights": "e4m3"})
    with pytest.raises(TypeError, match="weights"):
        FivePoint(weights="e4m3")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("e4m33", ValueError, "FivePoint: act: unknown format 'e4m33'.*did you mean"),
        (8, TypeError, "FivePoint: act: a format must be"),
        (("e4m3", "stochastic"), TypeError, r"act must be one format, or a Quantizer .*: write qsim\.Quantizer\('e4m3', 'stochastic'\)"),
        (
            {"format": "e4m3", "rounding": "stochastc"},
            ValueError,
            "FivePoint: act: unknown rounding 'stochastc': did you mean 'stochastic'",
        ),
        (
            {"format": "e4m3", "overflow": "wrap"},
            ValueError,
            "overflow must be 'saturate', 'saturate_symmetric' or 'nonfinite', got 'wrap'",
        ),
        ({"format": "e4m3", "round": "up"}, TypeError, "FivePoint: act has no 'round'; a point has format, rounding, overflow"),
        ({"rounding": "up"}, TypeError, "FivePoint: act needs a format, got {'rounding': 'up'}"),
        ({"format": "e4m3", "clip_gradient": "no"}, TypeError, "FivePoint: act: .*clip_gradient must be True or False, got 'no'"),
        ({"format": "e4m3", "rounding": "Stochastic(bits=33)"}, ValueError, "bits must be in 1…32, got 33"),
        (
            {"format": "e4m3", "rounding": "Stochastic(bits=open('x'))"},
            ValueError,
            "arguments must be plain numbers, strings, True, False or None",
        ),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FivePoint.from_dict({"act": given})


@pytest.mark.parametrize("text", ["null", '"e4m3"', "[1]"])
def test_a_configuration_is_a_dictionary(text: str) -> None:
    with pytest.raises(qsim.FileError, match="FivePoint: a configuration is a dictionary of points, got"):
        FivePoint.from_json(text)


def test_a_point_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ValueError, match="FivePoint: weight_bwd: unknown format 'Same'"):
        FivePoint(weight_bwd="Same")


@pytest.mark.parametrize(
    "scale", [scaling.PerTensor(), scaling.PerRow(), scaling.Delayed(4), scaling.PerBlock(16, format="e4m3", outer=scaling.PerTensor())]
)
@pytest.mark.parametrize("format", ["e7m2", "bf16"])
def test_scales_that_bring_products_beyond_float32_are_refused(scale: scaling.Scaling, format: str) -> None:
    wide = Quantizer(format, scale=scale)
    reason = "products overflow float32: give the scales a margin, or omit them"
    for points in ({"act": wide, "weight": wide}, {"grad": wide, "weight_bwd": wide}, {"weight": wide, "grad": wide, "weight_bwd": "same"}):
        if not (points.get("weight_bwd") == "same" and scale.is_directed):
            with pytest.raises(ValueError, match=reason):
                FivePoint(**points)


@pytest.mark.parametrize("format", ["e5m2", "e6m3", "fp16"])
def test_formats_that_need_scales_may_have_them(format: str) -> None:
    x, w = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), torch.ones(4, 64)
    for scale in (scaling.PerTensor(), scaling.PerRow(), scaling.PerTensor(margin=3)):
        wide = Quantizer(format, scale=scale)
        found = qsim.nn.functional.linear(x, w, None, FivePoint(wide, wide))
        torch.testing.assert_close(found, x @ w.T, rtol=0.2, atol=2.0)
    # With a margin, wider formats are allowed, too.
    wide = Quantizer("e7m2", scale=scaling.PerTensor(margin=40))
    torch.testing.assert_close(qsim.nn.functional.linear(x, w, None, FivePoint(wide, wide)), x @ w.T, rtol=0.2, atol=2.0)
