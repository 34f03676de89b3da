"""The first steps of every function with points: check whether there is anything to round, and check the arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from qsim import recipes
from qsim.formats.dtypes import FLOATS
from qsim.functional.tracing import refuse_tracing
from qsim.nn.product.autocast import autocasts
from qsim.nn.product.bilinear import Product
from qsim.nn.product.plans import ProductPlan, plan_of
from qsim.nn.product.scaled_checks import check_matmul
from qsim.nn.product.setting import ProductSetting
from qsim.nn.transforms import check_transforms
from qsim.random.streams import own_rank
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe
from qsim_kernels.ops.direct import DISPATCHED, operators


def plan_for(
    points: object, product: Product, a: Tensor, w: Tensor, bias: Tensor | None = None, *, two_inputs: bool = False
) -> ProductPlan | None:
    """The plan of a product with points, or `None` if there is nothing to round.

    Arguments are checked where no plan is known for their kind. A plan is found by all that these checks depend on.
    """
    ops = operators(a, w, bias)
    if ops is DISPATCHED or type(points) is not FivePoint or points.is_delayed:
        return _checked_plan(points, product, a, w, bias, two_inputs=two_inputs)
    device = a.device
    lower = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    rank = own_rank() if points.is_stochastic else 0
    of_bias = None if bias is None else (bias.device, bias.dtype)
    key = ops, product, two_inputs, a.dtype, w.dtype, w.dim(), device, w.device, of_bias, lower, rank
    plan: ProductPlan | None = points.plans.get(key)
    if plan is None:
        plan = points.plans[key] = _checked_plan(points, product, a, w, bias, two_inputs=two_inputs)
    return plan


def _checked_plan(points: object, product: Product, a: Tensor, w: Tensor, bias: Tensor | None, *, two_inputs: bool) -> ProductPlan | None:
    if not rounds(points, a, w):
        return None
    if two_inputs and points.is_scaled:
        check_matmul(points)
    x, weight, shift, dtype = operands(a, w, bias, points, two_inputs=two_inputs)
    plan = plan_of(ProductSetting(points, product, two_inputs, dtype=dtype), x, weight)
    return plan if dtype is None else replace(plan, casts=(x.dtype, weight.dtype, dtype if shift is None else shift.dtype))


def rounds(points: object, a: Tensor, w: Tensor) -> TypeGuard[FivePoint]:
    """Whether there is anything to round; raise an error for points that are no `FivePoint`, and where autograd functions do not work.

    Args:
        points: Where to round.
        a: The first operand.
        w: The second one.
    """
    if points is None:
        return False
    if not isinstance(points, FivePoint):
        why = ", which is for a model: give recipe.points" if isinstance(points, Recipe) else recipe_hint(points)
        got = f"the recipe {points.name}" if isinstance(points, Recipe) else repr(points)
        raise TypeError(f"points must be a FivePoint or None, got {got}{why}")
    if points.is_identity:
        return False
    if points.is_delayed:
        raise ValueError(
            "delayed scales live in a module, which keeps their history: give the points to a layer of qsim.nn, or to qsim.convert"
        )
    if torch._C._are_functorch_transforms_active():
        check_transforms(points)
    refuse_tracing("layers with points", a, w, has_points=True)
    return True


def recipe_hint(points: object) -> str:
    """The hint for a recipe's name given as the points of one layer; empty if it is not a recipe's name."""
    return f"; the recipe's points are recipes.{points}().points" if isinstance(points, str) and points in recipes.NAMED else ""


def operands(
    a: Tensor, b: Tensor, bias: Tensor | None, points: FivePoint, *, two_inputs: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype | None]:
    """The arguments of a product, checked, and the dtype of its result under autocast.

    Autocast casts operands that no point rounds forward to 16 bits. Those that a point rounds are rounded once, in their own dtype.
    """
    for operand in (a, b):
        if operand.layout != torch.strided:
            raise TypeError(f"points round dense tensors only, got an operand of layout {operand.layout}")
        if operand.dtype not in FLOATS:
            raise TypeError(f"points round float32, bfloat16, float16 and float64 only, got an operand of {operand.dtype}")
    if a.device != b.device or (bias is not None and bias.device != a.device):
        devices = ", ".join(str(x.device) for x in (a, b, bias) if x is not None)
        raise ValueError(f"the operands of a product must be on one device, got {devices}")
    if not autocasts(a.device):
        _check_one_dtype(*(x.dtype for x in (a, b, bias) if x is not None))
        return a, b, bias, None
    lower = torch.get_autocast_dtype(a.device.type)
    _check_one_dtype(*(torch.float64 if x.dtype == torch.float64 else lower for x in (a, b, bias) if x is not None))
    dtype = torch.float64 if a.dtype == torch.float64 else lower
    a = a.to(dtype) if points.act is None else a
    b = b.to(dtype) if (points.act if two_inputs else points.weight) is None else b
    return a, b, None if bias is None else bias.to(dtype), dtype


def _check_one_dtype(*dtypes: torch.dtype) -> None:
    """Raise an error for operands of several dtypes, which torch's own products refuse, too."""
    if len(set(dtypes)) > 1:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"the operands of a product, and its bias, must be of one dtype, as in torch, got {names}: cast them, or use autocast"
        )


def check_bias(name: str, bias: Tensor | None, features: int) -> None:
    """Raise an error for a bias without exactly one number per feature; a broadcast bias would get a wrong gradient."""
    if bias is not None and bias.shape != (features,):
        raise ValueError(f"{name}: bias must have shape {(features,)}, got {tuple(bias.shape)}")
