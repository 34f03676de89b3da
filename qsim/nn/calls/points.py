"""The points at which a product of a running module is rounded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from qsim.formats.dtypes import FLOATS
from qsim.nn.calls.running import running
from qsim.nn.calls.settings import call_points
from qsim.nn.histories import with_histories
from qsim.nn.lineage import base_of_view, parameter_of
from qsim.nn.modules import FivePointModule
from qsim.nn.product import observers
from qsim.nn.record import InUse, ProductRounding
from qsim.random.sources import varied
from qsim.random.streams import stream
from qsim.recipes.five_point import FivePoint


def weight_of(x: Any) -> InUse | None:
    """How a tensor is rounded that comes from a parameter; `None` if it does not, or if the module that has it is left alone."""
    parameter = _parameter(x)
    if parameter is None or parameter.dtype not in FLOATS:
        return None
    found = _owner(parameter)
    if found is None:
        return None
    owner, name = found
    calls, innermost = call_points(owner), running.modules[-1]
    if calls is None and not isinstance(owner, FivePointModule) and isinstance(innermost, FivePointModule):
        owner = innermost  # attention, whose output projection is a module in it
    observers.enter_call(owner, name)
    if calls is not None:
        points = _points_in_use(owner, name, calls)
        return None if points is None else InUse(points, calls.stream(owner.training, name))
    if not isinstance(owner, FivePointModule) or owner.points.is_identity:
        return None
    own = owner.in_use
    return own._replace(stream=varied(own.stream, stream("attention", name))) if owner is innermost else own


def table_of(x: Tensor) -> InUse | None:
    """How the table of an embedding with points is rounded in lookups, as by the layer; `None` for other tensors."""
    parameter = _parameter(x)
    owner, name = (None if parameter is None else _owner(parameter)) or (None, "")
    if not isinstance(owner, FivePointModule) or not isinstance(owner, nn.Embedding) or owner.points.is_identity:
        return None
    observers.enter_call(owner, name)
    return owner.in_use


def _points_in_use(owner: nn.Module, name: str, calls: ProductRounding) -> FivePoint | None:
    """The points of products with a parameter, with their histories; `None` if scales are delayed and it is a vector, which has none."""
    if not calls.points.is_delayed:
        return calls.points
    if name not in calls.in_use:
        found = with_histories(owner, calls.points, f"{name}_")
        calls.in_use[name] = calls.points, None if found.is_delayed else found
    return calls.in_use[name][1]


def of_activations(a: Tensor, b: Tensor) -> InUse | None:
    """How the innermost running module rounds a product of two activations, if it does.

    Parameters of modules that are left alone are no activations, nor are buffers: they hold constants, such as the frequencies of rotary
    embeddings.
    """
    module = running.modules[-1]
    calls = call_points(module)
    if not isinstance(module, FivePointModule) and (calls is None or not calls.of_activations):
        return None
    if a.dtype not in FLOATS or b.dtype not in FLOATS:
        return None
    constants = list(module._buffers.values())
    if any(_parameter(x) is not None or any(base_of_view(x) is constant for constant in constants) for x in (a, b)):
        return None
    observers.enter_call(module, "")
    if isinstance(module, FivePointModule):  # attention
        points, number = module.in_use
        return InUse(points, varied(number, stream("attention", "activations")))
    assert calls is not None
    return InUse(calls.points, calls.stream(module.training, "activations"))


def _parameter(x: Any) -> Tensor | None:
    """The parameter that a tensor comes from, or the tensor that `torch.func.functional_call` has put in its place."""
    found = parameter_of(x)
    return base_of_view(x) if found is None and isinstance(x, Tensor) and _replaces(base_of_view(x)) else found


def _replaces(x: Tensor) -> bool:
    """Whether a tensor replaces a parameter of the running modules."""
    if any(x is own for own in running.modules[-1]._parameters.values()):
        return True
    if torch.compiler.is_compiling():  # compilers would trace a search for each product
        return any(x is own for own in _replacements())
    return x.shape in _shapes() and _searched(x) is not None


def _replacements() -> list[Tensor]:
    """The tensors that replace parameters of the outermost running module."""
    if running.replacements is None:
        given: list[Tensor | None] = [own for module in running.modules[0].modules() for own in module._parameters.values()]
        running.replacements = [own for own in given if own is not None and not isinstance(own, nn.Parameter)]
    return running.replacements


def _shapes() -> set[torch.Size]:
    """The shapes of the parameters of the outermost running module, which their replacements have as well."""
    if running.shapes is None:
        running.shapes = {parameter.shape for parameter in running.modules[0].parameters() if not is_lazy(parameter)}
    return running.shapes


def _searched(parameter: Tensor) -> tuple[nn.Module, str] | None:
    """The module that has a parameter, and its name there: the running module, a module in it, or in one around it."""
    for module in reversed(running.modules):
        for owner in module.modules():
            for name, own in owner._parameters.items():
                if own is parameter:
                    return owner, name
    return None


def _owner(parameter: Tensor) -> tuple[nn.Module, str] | None:
    return _searched(parameter) if torch.compiler.is_compiling() else _known(parameter)


#: Owners found before. A checkpoint recomputes a module without those around it, which may have the parameter.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _known(parameter: Tensor) -> tuple[nn.Module, str] | None:
    """`_searched`, remembered. A shared parameter belongs to the running module, if that has it."""
    innermost = running.modules[-1]
    for name, own in innermost._parameters.items():
        if own is parameter:
            return innermost, name
    reference, name = _owners.get(parameter, (None, ""))
    owner = None if reference is None else reference()
    if owner is not None and owner._parameters.get(name) is parameter:
        return owner, name
    found = _searched(parameter)
    if found is not None:
        _owners[parameter] = weakref.ref(found[0]), found[1]
    return found
