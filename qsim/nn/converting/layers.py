"""The layers of a model: their names, their classes with points, and why some are left alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from qsim.formats.dtypes import FLOATS
from qsim.nn import modules
from qsim.nn.attention import MultiheadAttention
from qsim.nn.product.scaled_checks import check_groups
from qsim.recipes.five_point import FivePoint

_TARGETS: dict[type[nn.Module], type[modules.FivePointModule]] = {
    nn.Linear: modules.Linear,
    nn.Conv1d: modules.Conv1d,
    nn.Conv2d: modules.Conv2d,
    nn.Conv3d: modules.Conv3d,
    nn.ConvTranspose1d: modules.ConvTranspose1d,
    nn.ConvTranspose2d: modules.ConvTranspose2d,
    nn.ConvTranspose3d: modules.ConvTranspose3d,
    nn.MultiheadAttention: MultiheadAttention,
    nn.Embedding: modules.Embedding,
}


@dataclass(frozen=True)
class Layer:
    """A module of a model that multiplies by weights, or something like it.

    Attributes:
        names: Its names in the model; a shared module has several.
        module: The module.
        obstacle: Why it cannot get points; empty if it can.
    """

    names: tuple[str, ...]
    module: nn.Module
    obstacle: str

    @property
    def title(self) -> str:
        """Its names, for tables and errors."""
        return ", ".join(name or "(the model)" for name in self.names)


def layers(model: nn.Module) -> list[Layer]:
    """The layers of a model, including those that cannot get points, in module order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    own = {part for module in names for part in _parts(module)}
    found = []
    for module, known_as in names.items():
        obstacle = "" if isinstance(module, modules.FivePointModule) or target(module) else _obstacle(module)
        if module not in own and obstacle is not None:
            found.append(Layer(tuple(known_as), module, obstacle))
    return found


def kind(module: nn.Module) -> type[nn.Module]:
    """A module's class below those of parametrizations and FSDP, or the class that a lazy module will become."""
    if is_parametrized(module):
        return type(module).__bases__[0]
    first, *others = type(module).__bases__
    if others and first.__module__.startswith("torch.distributed."):
        return others[-1]
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        return module.cls_to_become
    return type(module)


def target(module: nn.Module) -> type[modules.FivePointModule] | None:
    """The class with points for a module's class, if there is one: only for torch's own classes, not for derived ones."""
    own = kind(module)
    if (own.__module__, own.__qualname__) == ("transformers.pytorch_utils", "Conv1D"):
        from qsim.nn.hugging_face import Conv1D

        return Conv1D
    return _TARGETS.get(own)


def check(layer: Layer, points: FivePoint) -> None:
    """Raise an error for a layer that would not round, or not work, with points."""
    module = layer.module
    with_points = type(module) if isinstance(module, modules.FivePointModule) else target(module)
    if with_points is not None:
        try:
            with_points.check_points(points)
            if getattr(module, "groups", 1) > 1:
                check_groups(type(module).__name__, points, bool(module.transposed))
        except ValueError as error:
            raise ValueError(f"convert: {layer.title}: {error}") from error
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise ValueError(f"convert: {layer.title} is lazy and has seen no input: call the model once before, or exclude the layer")
    if "forward" in vars(module):
        raise ValueError(f"convert: {layer.title} has a forward of its own, set on the module past its class: undo that, or exclude it")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        raise ValueError(f"convert: {layer.title} has max_norm or sparse=True, which cannot be combined with points: exclude it")
    for name, parameter in module.named_parameters():
        if parameter.dtype not in FLOATS:
            dtypes = "float32, bfloat16, float16 and float64"
            raise TypeError(f"convert: {layer.title} has a {name} of {parameter.dtype}, and points round {dtypes} alone: exclude it")


def _parts(module: nn.Module) -> list[nn.Module]:
    """The inner modules that belong to their parent: attention's output projection, and parametrizations."""
    if isinstance(module, nn.MultiheadAttention):
        return [part for part in module.modules() if part is not module]
    if is_parametrized(module):
        parametrizations = module.parametrizations
        assert isinstance(parametrizations, nn.ModuleDict)
        return list(parametrizations.modules())
    return []


def _obstacle(module: nn.Module) -> str | None:
    """Why a module without a counterpart is left alone; `None` if it does not multiply by weights."""
    if isinstance(module, tuple(_TARGETS)):
        own = kind(module)
        return f"convert does not know {own.__module__}.{own.__qualname__}"
    matrices = [name for name, parameter in module.named_parameters(recurse=False) if not is_lazy(parameter) and parameter.dim() > 1]
    if matrices:
        return f"has weights of its own: {', '.join(matrices)}"
    if _attends(module) and not any(_attends(inner) for inner in module.modules() if inner is not module):
        return "multiplies queries, keys and values by itself"
    return None


def _attends(module: nn.Module) -> bool:
    """Whether a module of Hugging Face's is attention, which they rewrite for each model."""
    own = type(module)
    return own.__module__.startswith(("transformers.", "transformers_modules.")) and "Attention" in own.__qualname__
