"""The components of a serving engine, and the points that they give to layers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsim import accumulators, recipes
from qsim.accumulators import Accumulator
from qsim.checkpoints.reading import is_exported
from qsim.checkpoints.saving import load
from qsim.formats import E4M3, FP32
from qsim.functional.quantizer import Point, Quantizer, short
from qsim.nn.converting.convert import convert, revert
from qsim.nn.record import points_of_module
from qsim.recipes.five_point import FivePoint
from qsim.recipes.named import NAMED
from qsim.recipes.recipe import Recipe
from qsim.rounding import NEAREST
from qsim.scaling import NVFP4, Block, PerRow, PerTensor

#: Names of modules that choose experts.
ROUTERS = ("*.gate", "*.router")
_ROWS, _NONE, _UNROUNDED = Quantizer(E4M3, scale=PerRow()), FivePoint(), "not rounded"
#: What servers make of a model without a recipe of its own. NVFP4's scale of a whole weight is a power of two, which layouts store exactly.
SERVED = {
    "fp8": FivePoint(_ROWS, _ROWS),
    "nvfp4": FivePoint(NVFP4, Block("e2m1", 16, scale="e4m3", rule="fit", outer=PerTensor("e8m0", "ceil"))),
}
Serving = str | os.PathLike[str] | Recipe | FivePoint


@dataclass(frozen=True)
class ServingEngine:
    """The settings of a serving engine.

    Attributes:
        points: The points of layers and of modules with products of their own, by name.
        router: The rounding in routers; `None` for none.
        routers: The names of the routers.
        cache: The rounding of keys and values; `None` for none.
        accumulate: The accumulator of forward products; `None` for torch's.
        dtype: The dtype of parameters and of what is computed from them; `None` for the model's.
        weights: Parameters that a checkpoint has given, already rounded.
        folder: The checkpoint.
    """

    points: Mapping[str, FivePoint]
    router: Quantizer | None = None
    routers: tuple[str, ...] = ()
    cache: Quantizer | None = None
    accumulate: Accumulator | None = None
    dtype: torch.dtype | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    folder: str = ""

    def components(self, trained: Mapping[str, FivePoint]) -> dict[str, str]:
        """The components in which the engine differs from a model in training, by name, each with what the engine does there.

        Args:
            trained: The points of the trained model, by name.
        """
        both = (*self.points.values(), *trained.values())
        weights, inputs = (_kinds(getattr(own, name) for own in self.points.values()) for name in ("weight", "act"))
        weights = f"of {self.folder}" if self.weights else weights
        found = {
            "dtype": "" if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "weights": weights or (_UNROUNDED if any(own.weight or own.bias for own in both) else ""),
            "inputs": inputs or (_UNROUNDED if any(own.act or own.output for own in both) else ""),
            "sums": "" if self.accumulate is None else accumulators.name_of(self.accumulate),
            "cache": "" if self.cache is None else short(self.cache),
            "router": "" if self.router is None or not self.routers else short(self.router),
        }
        found["sums"] = found["sums"] or ("fp32" if any(own.sums[0] for own in both) else "")
        return {name: setting for name, setting in found.items() if setting}

    @property
    def adds_anything(self) -> bool:
        """Whether the accumulator takes operands that are not rounded; a matrix unit takes those in its formats."""
        try:
            return self.accumulate is None or bool(self.accumulate.sum_of(FP32, FP32))
        except ValueError:
            return False

    def points_with(self, on: Collection[str], trained: Mapping[str, FivePoint]) -> dict[str, FivePoint]:
        """The points of modules when some components are those of the engine, and the others those of the trained model."""
        found = {}
        for name in {**self.points, **trained}:
            ours, theirs = trained.get(name, _NONE), self.points.get(name, _NONE)
            operand, weight = (theirs if part in on else ours for part in ("inputs", "weights"))
            sums = self.accumulate if "sums" in on else ours.sums[0]
            if "sums" in on and not self.adds_anything and not {"weights", "inputs"} <= set(on):
                sums = None
            found[name] = FivePoint(operand.act, weight.weight, output=operand.output, bias=weight.bias, accumulate=(sums, None, None))
        if "router" in on:
            found |= dict.fromkeys(self.routers, FivePoint(self.router, self.router, output=self.router))
        return {name: own for name, own in found.items() if not own.is_identity}


def _kinds(points: Iterable[Any]) -> str:
    """Roundings in words, each once."""
    return ", ".join(dict.fromkeys(short(point) for point in points if isinstance(point, Quantizer)))


def engine_of(
    model: nn.Module,
    serving: Serving,
    *,
    cache: Point,
    router: Point,
    accumulate: Accumulator | str | None,
    dtype: torch.dtype | None,
    exclude: str | Iterable[str] | None,
) -> ServingEngine:
    """The settings for a model; the model, which is a copy, loses its own points, and may get others.

    Raises:
        TypeError: If `serving` is of another type.
        ValueError: If there is no such serving; and as `qsim.convert` and `qsim.load`.
    """
    routers = tuple(name for name, module in model.named_modules() if _is_router(name, module))
    sums = None if accumulate is None else accumulators.resolve(accumulate)
    engine = ServingEngine({}, _quantizer(router), routers, _quantizer(cache), sums, dtype)
    revert(model)
    points = resolved(serving)
    if isinstance(points, Path):
        return _with_checkpoint(engine, model, points)
    left = [*routers, *(_heads(model) if exclude is None else [exclude] if isinstance(exclude, str) else exclude)]
    convert(model, points, exclude=left or None)
    return replace(engine, points={name: _forward(own) for name, own in points_in(model).items()})


def resolved(serving: object) -> FivePoint | Recipe | Path:
    """The points, the recipe or the folder that an argument means."""
    if isinstance(serving, (FivePoint, Recipe)):
        return serving
    if not isinstance(serving, (str, os.PathLike)):
        raise TypeError(f"twin: serving must be a name, a recipe, a FivePoint or the path of a checkpoint, got {serving!r}")
    if isinstance(serving, str) and serving.lower() in SERVED:
        return SERVED[serving.lower()]
    if Path(serving).is_dir():
        return Path(serving)
    if isinstance(serving, str) and serving.partition(".with_")[0].partition("(")[0].strip().lower() in NAMED:
        return recipes.resolve(serving)
    names = ", ".join(map(repr, SERVED))
    raise ValueError(f"twin: serving must be {names}, the name of a recipe or the folder of a checkpoint, got {os.fspath(serving)!r}")


def _with_checkpoint(engine: ServingEngine, model: nn.Module, folder: Path) -> ServingEngine:
    """An engine with an exported checkpoint: its weights, and the points of inputs."""
    if not is_exported(folder):
        raise ValueError(f"twin: {folder} has no quantization_config of a layout that qsim.load reads")
    if engine.accumulate is not None and not engine.adds_anything:
        raise ValueError(
            f"twin: {accumulators.name_of(engine.accumulate)} needs to know the formats of both operands: give serving as a recipe"
        )
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():  # they share memory with the trained model's
        parameter.data = parameter.data.clone()
    load(model, folder)
    changed = {name: own.detach() for name, own in model.named_parameters() if not torch.equal(own, before[name])}
    points = {name: _forward(own) for name, own in points_in(model).items()}
    return replace(engine, points=points, weights=changed, folder=folder.name)


def points_in(model: nn.Module) -> dict[str, FivePoint]:
    """The points of all modules that have some."""
    found = {name: points_of_module(module) for name, module in model.named_modules()}
    return {name: own for name, own in found.items() if own is not None and not own.is_identity}


def _forward(points: FivePoint) -> FivePoint:
    """The roundings of a forward pass as an engine does them: to nearest instead of stochastically."""
    operands = (
        replace(point, rounding=NEAREST) if isinstance(point, Quantizer) and point.rounding.is_stochastic else point
        for point in (points.act, points.weight)
    )
    return FivePoint(*operands)


def _is_router(name: str, module: nn.Module) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ROUTERS) and isinstance(getattr(module, "weight", None), Tensor)


def _heads(model: Any) -> list[str]:
    """The output head of a model of transformers, which servers keep in high precision."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [name for name, module in model.named_modules() if module is head]


def _quantizer(point: Point) -> Quantizer | None:
    return point if point is None or isinstance(point, Quantizer) else Quantizer(point)
