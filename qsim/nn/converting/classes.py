"""Classes of modules: below those of parametrizations and FSDP, and with one of their ancestors replaced."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from qsim.nn.calls.modules import RoundsCalls


def kind(module: nn.Module) -> type[nn.Module]:
    """A module's class below those of parametrizations, FSDP and rounded calls, or the class that a lazy module will become."""
    found = type(module)
    if is_parametrized(module):
        found = found.__bases__[0]
    elif len(found.__bases__) > 1 and found.__bases__[0].__module__.startswith("torch.distributed."):
        found = found.__bases__[-1]
    elif isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        found = module.cls_to_become
    return found.without_calls if issubclass(found, RoundsCalls) else found


def with_ancestor_replaced(cls: type, old: type, new: type) -> type:
    """A class with one of its ancestors replaced: parametrizations and FSDP derive their own classes from a layer's."""
    if cls is old:
        return new
    if old not in cls.__mro__:
        return cls
    return type(cls.__name__, tuple(with_ancestor_replaced(base, old, new) for base in cls.__bases__), dict(vars(cls)))
