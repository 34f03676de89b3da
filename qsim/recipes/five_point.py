"""The five points at which a layer rounds: *Training with Fewer Bits*, Algorithms 1 and 2."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args

import torch

from qsim import accumulators, points
from qsim.accumulators import Accumulator
from qsim.accumulators.chips import Chip, check_chip
from qsim.formats import Format
from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import GRADIENTS, Point, Quantizer, check_call, is_stochastic, short
from qsim.recipes.handles import new_handle
from qsim.recipes.parts import PointsOfParts, parts_of
from qsim.scaling import Delayed, PerBlock, PerTensor, PerTile
from qsim.scaling.block_formats import Block
from qsim.scaling.tiling import PerSlice
from qsim.text.files import reading

#: The names of the points, in the order of Algorithms 1 and 2.
POINTS = ("act", "weight", "act_bwd", "weight_bwd", "grad", "grad_w", "output", "bias")
#: The other values of a backward point: what the forward pass rounded, or that rounded again.
REUSES = ("same", "requantized")

#: A point as it is kept.
Used = Quantizer | CallablePoint | None
Reuse = Literal["same", "requantized"]
#: What backward points round.
BackwardOf = Literal["original", "rounded"]
#: What a point is given as: a `Quantizer`, a format or its name (with round-to-nearest), a callable, or `None` for full precision.
PointLike = Point | CallablePoint | Callable[..., Any]
#: The accumulators of the three products of a layer: forward, for the gradient of the input, for that of the weight.
Three = tuple[Accumulator | None, Accumulator | None, Accumulator | None]
#: What accumulators are given as: one for all, or three.
Accumulate = Accumulator | str | Sequence[Accumulator | str | None] | None


@dataclass(frozen=True)
class FivePoint:
    """The points at which a layer rounds: two operands in the forward pass, and three in the backward pass.

    A point is a `Quantizer`, anything that `qsim.format` takes (with round-to-nearest), any callable or `nn.Module` from tensor to tensor
    (see `CallablePoint`), the call of one of `qsim.points` such as `"LSQ('int4')"`, or `None` for full precision. `FivePoint()` is the
    identity. A quantizer's `clip_gradient` applies to `act` and `weight`, the points that gradients pass through. Gradients that are
    rounded without a scale overflow to infinity, or to NaN in a format without one, so that a `torch.amp.GradScaler` takes a smaller
    scale; with `overflow="saturate"` their quantizer saturates.

    By default the backward pass uses what the forward pass rounded (`"same"`). Where that is not possible, because scales follow a
    direction or a transform must be undone, it rounds the original tensor again, with the same quantizer and other random bits.
    `"requantized"` rounds what the forward pass rounded once more. `None` is the original tensor.

    A module in a point becomes a part of the layer: of each converted layer a copy. Its parameters train if its gradient is its own and
    the point is `act`, `weight`, `output` or `bias`; optimizers must be created after the conversion. A callable that draws random numbers
    draws at every call. Callables cannot be exported, do not run on a chip, and get no shards of distributed tensors.

    In a layer every operand is scaled, and transformed, along the dimension over which its product sums, regardless of its quantizer's
    dimension: with scales per block or per channel the gradient is rounded once for each of its products. A transform must be set for both
    operands of a product, so that it cancels.

    With `accumulate`, products are summed by emulated accumulators: see `qsim.accumulators`. Scales of tensors and channels multiply their
    results; those of blocks and tiles are part of the operands, or enter with the short sums of a `Promoted` accumulator that they fit.
    Biases, and sums over batches to which an operand was broadcast, are added in float32.

    Args:
        act: The input, forward: `Â = Q(A)`.
        weight: The weight, forward: `Ŵ = Q(W)`.
        grad: The gradient of the output, for both products.
        act_bwd: The input in `∇W = Q(A)ᵀ Q(∇A)`, `"same"` or `"requantized"`.
        weight_bwd: The weight in `∇A = Q(∇A) Q(W)ᵀ`, `"same"` or `"requantized"`.
        grad_w: The gradient of the output for the product that gives ∇W, if it should not share `grad`'s rounding.
        output: The result, with the bias added.
        bias: The bias, before it is added.
        accumulate: An accumulator or its name for all products, or three: for the forward product, for ∇A, and for ∇W. `None` is torch's
            float32 sum.
        backward_of: What a rounding at `act_bwd` and `weight_bwd` gets: the `"original"` tensor, or what the forward pass made of it,
            `"rounded"`.
        chip: Whether an H100 or H200 multiplies itself where it has the accumulators' bits: `"auto"`, where it can; `"never"`; or
            `"require"`, which raises an error if it cannot. It changes speed, not results.

    Example:
        >>> import qsim
        >>> points = qsim.FivePoint(act="e4m3", weight="e4m3", grad="e5m2")
        >>> points.is_identity, qsim.FivePoint().is_identity
        (False, True)
        >>> qsim.FivePoint.from_dict(points.to_dict()) == points
        True
    """

    act: Used = None
    weight: Used = None
    grad: Used = None
    act_bwd: Used | Reuse = "same"
    weight_bwd: Used | Reuse = "same"
    grad_w: Used = None
    output: Used = None
    bias: Used = None
    accumulate: Accumulator | Three | None = None
    chip: Chip = "auto"
    backward_of: BackwardOf = "original"

    # Properties of the points, computed once for all calls. None of them is a field.
    #: Whether nothing is rounded, sums included; `"same"` as a forward point without rounding is no rounding either.
    is_identity: ClassVar[bool]
    #: Whether any point other than the weight's draws random bits, or an accumulator does.
    is_stochastic: ClassVar[bool]
    #: Whether a point of the weight draws random bits.
    weight_is_stochastic: ClassVar[bool]
    # Whether a weight's random bits are drawn at every call, rather than once until a step changes the weight.
    redraws_weight: ClassVar[bool]
    #: Whether a point has scales or a transform.
    is_scaled: ClassVar[bool]
    #: Whether the scale of a point follows from a history, which the layer must keep.
    is_delayed: ClassVar[bool]
    # Whether something is rounded before or after the product, in autograd.
    wraps: ClassVar[bool]
    # The products that may take the place of one, because the outliers of a tensor are apart: at most one for each tensor.
    splits: ClassVar[tuple[PointsOfParts, ...]]
    #: What rounds at each point: for `"same"` and `"requantized"`, the forward point.
    used: ClassVar[Mapping[str, Quantizer | CallablePoint | None]]
    #: The accumulators of the three products.
    sums: ClassVar[Three]
    # A cache of products with these points. It can be recomputed, and is not copied.
    plans: ClassVar[dict[Hashable, Any]]
    # Stands for these points where a compiler takes only plain constants; empty for points that exist only in a compiled function.
    handle: ClassVar[str]

    def __init__(
        self,
        act: PointLike = None,
        weight: PointLike = None,
        grad: PointLike = None,
        *,
        act_bwd: PointLike = "same",
        weight_bwd: PointLike = "same",
        grad_w: PointLike = None,
        output: PointLike = None,
        bias: PointLike = None,
        accumulate: Accumulate = None,
        chip: Chip = "auto",
        backward_of: BackwardOf = "original",
    ) -> None:
        if backward_of not in get_args(BackwardOf):
            raise ValueError(f"FivePoint: backward_of must be 'original' or 'rounded', got {backward_of!r}")
        object.__setattr__(self, "backward_of", backward_of)
        # Without a forward point, its original tensor and what was rounded are the same.
        act_bwd = "same" if act is None and act_bwd is None else act_bwd
        weight_bwd = "same" if weight is None and weight_bwd is None else weight_bwd
        given = (act, weight, act_bwd, weight_bwd, grad, grad_w, output, bias)
        for name, point in zip(POINTS, given, strict=True):
            object.__setattr__(self, name, _resolve(name, point))
        sums = _resolve_sums(accumulate)
        object.__setattr__(self, "sums", sums)
        object.__setattr__(self, "accumulate", sums[0] if sums[0] == sums[1] == sums[2] else sums)
        _check_chip(chip, sums)
        object.__setattr__(self, "chip", chip)
        if self.grad_w is not None and self.grad is None:
            raise ValueError("FivePoint: grad_w is the second product's own gradient quantizer and needs grad, the first one's")
        object.__setattr__(self, "used", {name: self._used(name) for name in POINTS})
        names = (("act", "weight"), ("grad", "weight_bwd"), ("grad" if self.grad_w is None else "grad_w", "act_bwd"))
        products = [{name: self.used[name] for name in pair} for pair in names]
        for operands in products:
            _check_transforms(operands)
            _check_range(operands)
        for operands, accumulator in zip(products, sums, strict=True):
            if accumulator is not None:
                _check_sum(operands, accumulator)
        quantizers = [point for point in self.used.values() if isinstance(point, Quantizer)]
        inputs = (self.act, self.act_bwd, self.grad, self.grad_w)
        object.__setattr__(self, "plans", {})
        object.__setattr__(self, "handle", "" if torch.compiler.is_compiling() else new_handle(self))
        summed = [accumulator for accumulator in sums if accumulator is not None]
        object.__setattr__(self, "is_identity", not any(self.used.values()) and not summed)
        noisy = any(map(is_stochastic, inputs)) or any(accumulator.is_stochastic for accumulator in summed)
        object.__setattr__(self, "is_stochastic", noisy)
        object.__setattr__(self, "weight_is_stochastic", any(map(is_stochastic, (self.weight, self.weight_bwd))))
        redraws = [isinstance(point, Quantizer) and point.redraw == "call" for point in (self.weight, self.weight_bwd)]
        object.__setattr__(self, "redraws_weight", any(redraws))
        object.__setattr__(
            self, "wraps", any(point is not None for point in (self.bias, self.output)) or any(map(_is_outside, (self.act, self.weight)))
        )
        object.__setattr__(self, "is_delayed", any(isinstance(point.scale, Delayed) for point in quantizers))
        object.__setattr__(self, "is_scaled", any(point.scale is not None or point.transform is not None for point in quantizers))
        object.__setattr__(self, "splits", parts_of(self))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Objects pickled by older versions, with fewer attributes, get the missing ones here.
        FivePoint.__init__(self, **{field.name: state[field.name] for field in fields(self) if field.name in state})

    def to_dict(self) -> dict[str, Any]:
        """Return the points as plain strings, booleans and dictionaries, for a configuration file, without those that do not round.

        Raises:
            ValueError: If a point is a callable, unless it is one of `qsim.points` with plain arguments, which is written as its call.
        """
        found: dict[str, Any] = {}
        for name in POINTS:
            point = getattr(self, name)
            if isinstance(point, CallablePoint) and point.call is None:
                raise ValueError(f"FivePoint: {name} is the callable {point.name}, which plain values cannot express")
            forward = getattr(self, name.removesuffix("_bwd"))
            if point is not None and (point != "same" or forward is not None):
                found[name] = point if isinstance(point, str) else point.call if isinstance(point, CallablePoint) else point.to_dict()
            elif name.endswith("_bwd") and forward is not None:
                found[name] = None
        if self.accumulate is not None:
            found["accumulate"] = self._named_sums()
        found |= {"backward_of": self.backward_of} if self.backward_of != "original" else {}
        return found if self.chip == "auto" else {**found, "chip": self.chip}

    def _named_sums(self) -> Any:
        """The accumulators by their names or calls."""
        names = [None if accumulator is None else accumulators.name_of(accumulator) for accumulator in self.sums]
        return list(names) if isinstance(self.accumulate, tuple) else names[0]

    def _used(self, name: str) -> Used:
        """The rounding at a point: where the forward point is used again, with the transform of the product there."""
        point = getattr(self, name)
        if not isinstance(point, str):
            return point  # type: ignore[no-any-return]
        forward = getattr(self, name.removesuffix("_bwd"))
        gradient = self.grad if name == "weight_bwd" or self.grad_w is None else self.grad_w
        transform = gradient.transform if isinstance(gradient, Quantizer) else None
        if not isinstance(forward, Quantizer) or forward.transform == transform:
            return forward  # type: ignore[no-any-return]
        return replace(forward, transform=transform, clip_gradient=False)

    def _given(self) -> dict[str, Used | str]:
        """The points that are not the usual ones."""
        given = {name: getattr(self, name) for name in POINTS}
        return {name: point for name, point in given.items() if point != ("same" if name.endswith("_bwd") else None)}

    def with_own_modules(self) -> FivePoint:
        """The same points, with copies of the modules in them for another layer; the points themselves if no module needs one.

        Layers with the same points share a compiled graph.
        """
        modules = {name: point for name in POINTS if isinstance(point := getattr(self, name), CallablePoint) and point.is_of_one_layer}
        memo: dict[int, Any] = {}
        copied = {name: replace(point, function=copy.deepcopy(point.function, memo)) for name, point in modules.items()}
        return replace(self, **copied) if copied else self  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> FivePoint:
        """Create the points of a configuration.

        Args:
            given: For each point the arguments of a `Quantizer`, the name of a format, the call of a ready-made point such as
                `"LSQ('int4')"`, or `"same"`; as `accumulate` an accumulator's name or call, or a list of three.

        Raises:
            TypeError: If it is not a dictionary, or a point has an argument that `Quantizer` does not take.
            ValueError: If there is no point of some name.
        """
        if not isinstance(given, Mapping):
            raise TypeError(f"FivePoint: a configuration is a dictionary of points, got {given!r}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"FivePoint has no point {name!r}; its points are {', '.join(POINTS)}, and it has accumulate, chip and backward_of"
                )
        found: dict[str, Any] = {}
        for name, point in given.items():
            found[name] = _quantizer(name, **point) if isinstance(point, Mapping) and name in POINTS else point
        return cls(**found)

    def to_json(self) -> str:
        """Return the points as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> FivePoint:
        """Create points from a JSON string.

        Raises:
            FileError: If the text is not JSON, or does not describe points.
        """
        with reading("FivePoint.from_json", "the text"):
            return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        """A short description of the points that round."""
        shown = {name: _shown(name, point) for name, point in self._given().items()}
        if self.accumulate is not None:
            named = self._named_sums()
            shown["accumulate"] = named if isinstance(named, str) else f"({', '.join(map(str, named))})"
        if self.backward_of != "original":
            shown["backward_of"] = self.backward_of
        if self.chip != "auto":
            shown["chip"] = self.chip
        return ", ".join(f"{name}={text}" for name, text in shown.items()) or "identity"


def _shown(name: str, point: Used | str) -> str:
    """A point in a short description."""
    return short(point, name) if isinstance(point, Quantizer) else str(point)


def _is_outside(point: object) -> bool:
    """Whether a point is called before the product, in autograd, for the sake of its gradient."""
    return isinstance(point, CallablePoint) and not point.is_straight


def _check_transforms(operands: Mapping[str, Used]) -> None:
    """Raise an error if the two operands of a product are transformed differently."""
    first, second = operands
    transforms = [point.transform if isinstance(point, Quantizer) else None for point in operands.values()]
    if transforms[0] == transforms[1]:
        return
    for name, partner in ((first, second), (second, first)):
        if not isinstance(operands[name], Quantizer):
            transform = next(transform for transform in transforms if transform is not None)
            alone = f"{name}, its partner in a product, has no quantizer with the same transform"
            raise ValueError(f"FivePoint: {partner} is transformed by {transform!r}, and {alone}")
    given = f"got {transforms[0]!r} and {transforms[1]!r}"
    raise ValueError(f"FivePoint: {first} and {second} are multiplied and must have the same transform, {given}")


#: Limit for products of operands: the headroom below float32's 2**128 is for their sums.
_LARGEST_PRODUCT = 2.0**100


def _check_range(operands: Mapping[str, Used]) -> None:
    """Raise an error for scales that bring operands near the limits of formats so wide that products exceed float32.

    Scales of channels and of whole tensors are multiplied into the product's result; its operands are as large as their formats allow.
    """
    reached = {name: _reached(point) for name, point in operands.items()}
    if math.prod(reached.values()) < _LARGEST_PRODUCT:
        return
    reach = " and ".join(f"{name} up to {largest:.2g}" for name, largest in reached.items() if largest > 1)
    raise ValueError(
        f"FivePoint: with per-tensor or per-channel scales, operands reach the ends of their formats, {reach}, and their products "
        "overflow float32: give the scales a margin, or omit them, because such formats need none"
    )


def _reached(point: Used) -> float:
    """The largest magnitude of a point's elements under a scale that follows from them and is multiplied in later; 1 if there is none."""
    if not isinstance(point, Quantizer) or point.scale is None:
        return 1.0
    if isinstance(point.scale, (PerTensor, Delayed, PerSlice)):
        return max(1.0, point.format.max * 2.0**-point.scale.margin)
    if point.scale.outer is not None:
        # Scales of blocks are in the operand, up to the limit of their own format.
        return max(1.0, point.format.max * point.scale.format.max * 2.0**-point.scale.outer.margin)
    return 1.0


def _check_sum(operands: Mapping[str, Used], accumulator: Accumulator) -> None:
    """Raise an error for an accumulator that does not take an operand's format; what scales of blocks make of it is checked later."""
    for name, point in operands.items():
        if isinstance(point, Quantizer) and not isinstance(point.scale, (PerBlock, PerTile)):
            try:
                accumulator.sum_of(point.format, point.format)
            except ValueError as error:
                raise ValueError(f"FivePoint: {name}: {accumulators.name_of(accumulator)}: {error}") from error


def _resolve(name: str, point: Any) -> Used | str:
    if isinstance(point, str) and point in REUSES:
        if name in ("act_bwd", "weight_bwd"):
            return point
        raise ValueError(f'FivePoint: {name}="{point}" has no forward tensor to reuse; only act_bwd and weight_bwd do')
    found = _resolved(name, point)
    if not isinstance(found, Quantizer):
        return found
    check_call(f"FivePoint: {name}", found)
    if found.redraw == "step" and not name.startswith("weight"):
        raise ValueError(f"FivePoint: {name}: redraw='step' is for weights, which steps change; other tensors draw at every call")
    if name in ("output", "bias") and found.transform is not None:
        raise ValueError(f"FivePoint: {name}: a transform cancels only in a product, got {found.transform!r}")
    return found.as_gradient() if name in GRADIENTS else found


def _resolved(name: str, point: Any) -> Used:
    if point is None or isinstance(point, (Quantizer, CallablePoint)):
        return point
    if isinstance(point, (tuple, list)):
        parts = ", ".join(map(repr, point))
        raise TypeError(f"FivePoint: {name} must be one format, or a Quantizer with further arguments: write qsim.Quantizer({parts})")
    if isinstance(point, str) and "(" in point:
        try:
            point = points.resolve(point) or point
        except (TypeError, ValueError) as error:
            raise type(error)(f"FivePoint: {name}: {error}") from error
    return CallablePoint(point) if callable(point) and not isinstance(point, (type, Format, Block)) else _quantizer(name, point)


def _resolve_sums(accumulate: Accumulate) -> Three:
    """The accumulators of the three products."""
    if accumulate is None or isinstance(accumulate, (Accumulator, str)):
        found = None if accumulate is None else _accumulator(accumulate)
        return found, found, found
    if not isinstance(accumulate, (tuple, list)) or len(accumulate) != 3:
        wanted = "an accumulator, or three: for the forward product, for the input's gradient and for the weight's"
        raise TypeError(f"FivePoint: accumulate must be {wanted}; got {accumulate!r}")
    forward, grad_a, grad_w = (None if given is None else _accumulator(given) for given in accumulate)
    return forward, grad_a, grad_w


def _check_chip(chip: Chip, sums: Three) -> None:
    check_chip("FivePoint", chip)
    if chip == "require" and not any(sums):
        raise ValueError("FivePoint: chip='require' is for products with an accumulator, and accumulate is None")


def _accumulator(given: Accumulator | str) -> Accumulator:
    try:
        return accumulators.resolve(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"FivePoint: accumulate: {error}") from error


def _quantizer(name: str, *given: Any, **options: Any) -> Quantizer:
    """The quantizer of a point; errors name the point."""
    known = [field.name for field in fields(Quantizer)]
    for option in options:
        if option not in known:
            raise TypeError(f"FivePoint: {name} has no {option!r}; a point has {', '.join(known)}")
    if not given and "format" not in options:
        raise TypeError(f"FivePoint: {name} needs a format, got {options}")
    try:
        return Quantizer(*given, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"FivePoint: {name}: {error}") from error
