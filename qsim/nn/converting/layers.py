"""The layers of a model: their names, their classes with points, and why some are left alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from qsim.nn import modules
from qsim.nn.attention import MultiheadAttention
from qsim.nn.calls.settings import own_matrices
from qsim.nn.converting.classes import kind
from qsim.nn.registry import LAYERS

#: Layers that multiply by no matrix, although their parameters may be missing as long as they have seen no input.
_LAZY_NORMS = (
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
    *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
)
#: Torch's layers, with their classes with points.
TARGETS: dict[type[nn.Module], type[modules.FivePointModule]] = {
    layer: (vars(modules) | {"MultiheadAttention": MultiheadAttention})[layer.__name__] for layer in LAYERS
}

ATTENTION = "multiplies queries, keys and values by itself"
EMBEDDING = "an embedding: embeddings=True converts it"
LAZY = "is lazy and has seen no input: call the model once before"
ADAPTER = "an adapter: adapters=True converts it"
_CONV1D = ("transformers.pytorch_utils", "Conv1D")


@dataclass(frozen=True)
class Layer:
    """A module of a model that multiplies by weights, or something like it.

    Attributes:
        names: Its names in the model; a shared module has several.
        module: The module.
        obstacle: Why it cannot get points like torch's layers; empty if it can.
        by_default: Why it is left alone unless it is asked for; empty if it is not.
    """

    names: tuple[str, ...]
    module: nn.Module
    obstacle: str
    by_default: str = ""

    @property
    def calls(self) -> str:
        """The products that it may compute by functions of torch: those with its own parameters, of which its code decides when it runs."""
        if self.obstacle in ("", ATTENTION) or isinstance(self.module, (nn.Embedding, nn.EmbeddingBag)):
            return ""
        own = [("", self.module), *((f"{name}.", part) for name, part in self.module.named_modules() if part in parts(self.module))]
        names = ", ".join(prefix + name for prefix, part in own for name in own_matrices(part))
        return f"any products with {names}" if names else ""

    @property
    def title(self) -> str:
        """Its names, for tables and errors."""
        return ", ".join(name or "(the model)" for name in self.names)


def layers(model: nn.Module) -> list[Layer]:
    """The layers of a model, including those that cannot get points, in module order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    own = {part for module in names for part in parts(module)}
    adapters = _adapters(model)
    found = []
    for module, known_as in names.items():
        is_layer = target(module) is not None
        obstacle = (LAZY if _is_lazy(module) else "") if is_layer else _obstacle(module)
        if module not in own and obstacle is not None:
            by_default = ADAPTER if module in adapters else EMBEDDING if isinstance(module, nn.Embedding) else ""
            found.append(Layer(tuple(known_as), module, obstacle, by_default))
    return found


def _adapters(model: nn.Module) -> set[nn.Module]:
    """The modules in which PEFT's layers keep what they add to a layer, such as LoRA's two matrices."""
    layers = [module for module in model.modules() if any(base.__module__.startswith("peft.tuners.") for base in type(module).__mro__)]
    named = [getattr(layer, name, None) for layer in layers for name in getattr(layer, "adapter_layer_names", ())]
    return {part for own in named if isinstance(own, nn.Module) for part in own.modules()}


def target(module: nn.Module) -> type[modules.FivePointModule] | None:
    """The class with points for a module's class, or its own if it has points. Classes derived from torch's have none."""
    if isinstance(module, modules.FivePointModule):
        return type(module)
    own = kind(module)
    if (own.__module__, own.__qualname__) == _CONV1D:
        from qsim.nn.hugging_face import Conv1D

        return Conv1D
    return TARGETS.get(own)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's `Conv1D`, a linear layer whose weight is the transpose of that of `torch.nn.Linear`."""
    return any((base.__module__, base.__qualname__) == _CONV1D for base in type(module).__mro__)


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(parameter) for parameter in module.parameters(recurse=False))


def parts(module: nn.Module) -> list[nn.Module]:
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
    if isinstance(module, tuple(TARGETS)):
        own = kind(module)
        return f"convert does not know {own.__module__}.{own.__qualname__}"
    if _is_lazy(module) and not isinstance(module, _LAZY_NORMS):
        return LAZY
    matrices = own_matrices(module)
    if matrices:
        return f"has weights of its own: {', '.join(matrices)}"
    if _attends(module) and not any(_attends(inner) for inner in module.modules() if inner is not module):
        return ATTENTION
    return None


def _attends(module: nn.Module) -> bool:
    """Whether a module of Hugging Face's is attention, which they rewrite for each model."""
    own = type(module)
    return own.__module__.startswith(("transformers.", "transformers_modules.")) and "Attention" in own.__qualname__
