"""Batches of a group's parameters for the operator: parameters of one device and one set of dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from qsim.optim import settings
from qsim.optim.settings import Options, UpdateSetting
from qsim.random import shards, streams
from qsim.random.places import WHOLE
from qsim_kernels.ops.direct import operators_of_lists

#: The lists of states in the order of the operator's arguments, with their names in a state_dict.
ROLES = (("exp_avg", "momentum_buffer"), ("exp_avg_sq",), ("max_exp_avg_sq",), ("compensation",), ("step",), ("beta_products",))
#: The shapes of states that are not as large as their parameter.
_SHAPES: dict[str, tuple[int, ...]] = {"step": (), "beta_products": (2,)}


@dataclass
class Batch:
    """Parameters that are updated together.

    Attributes:
        setting: The formats and roundings.
        params: The parameters.
        streams: Their streams of random bits.
        places: The positions of this process's shards in the whole, three numbers each.
        states: Their states, a list for each of `ROLES`, empty if there are none.
        owners: The optimizer's states of each parameter, by name.
        owned: All of these states, as they were when they were listed.
        are_shards: Whether they are distributed.
    """

    setting: UpdateSetting
    params: list[Tensor] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in ROLES])
    owners: list[dict[str, Any]] = field(default_factory=list)
    owned: list[Any] = field(default_factory=list)
    are_shards: bool = False

    def is_of(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether the optimizer still has these states: those of some parameters may have been cleared or replaced."""
        if not all(map(is_, map(state.get, self.params), self.owners)):
            return False
        owned = list(chain.from_iterable([owner.values() for owner in self.owners]))
        return len(owned) == len(self.owned) and all(map(is_, owned, self.owned))

    def update(self, lr: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None, seed: int, algorithm: str) -> None:
        """Update the parameters by one step. Call it under `torch.no_grad()`."""
        params: list[Tensor] = self.params
        grads: list[Any] = [p.grad for p in params]  # there are some in a batch
        if self.are_shards:
            grads = [_local_gradient(g, p) for g, p in zip(grads, params, strict=True)]
            params = [shards.local(p) for p in params]
        device = params[0].device
        first, second, largest, compensations, steps, products = self.states
        operators_of_lists(params, grads).update_(
            params, grads, first, second, largest, compensations, steps, products, lr if lr.device == device else lr.cpu(),
            _on(grad_scale, device), _on(found_inf, device), seed, self.streams, self.places, algorithm, *self.setting.roundings,
        )  # fmt: skip


def batches_of(
    params: list[Tensor],
    state: dict[Tensor, dict[str, Any]],
    first: int,
    options: Options,
    states_of: Callable[[UpdateSetting], dict[str, torch.dtype]],
) -> list[Batch]:
    """Sort the parameters with gradients into batches, and create missing states.

    Args:
        params: The parameters of a group.
        state: The optimizer's state.
        first: Number of the first of them in the optimizer.
        options: The first arguments of `settings.setting`.
        states_of: The states that parameters of a setting have, with their dtypes.
    """
    batches: dict[object, Batch] = {}
    for number, p in enumerate(params, start=first):
        if p.grad is None:
            continue
        setting = settings.setting(*options, p.dtype)
        is_shard = shards.is_distributed(p)
        batch = batches.setdefault((p.device, p.dtype, p.grad.dtype, is_shard), Batch(setting, are_shards=is_shard))
        batch.params.append(p)
        # The last bits of a stream distinguish the roles of random bits within an update.
        batch.streams.append(streams.stream("optimizer", number) & ~3)
        batch.places += (shards.place_of(p) if is_shard and setting.draws else WHOLE)[:3]  # type: ignore[arg-type]
        own, dtypes = state[p], states_of(setting)
        _check_shapes(own, p, number, dtypes)
        _add_states(own, p, dtypes)
        batch.owners.append(own)
        batch.owned += own.values()
        for states, names in zip(batch.states, ROLES, strict=True):
            # Others may remain from options that were set before.
            states += [shards.local(own[name]) for name in names if name in dtypes]
    return list(batches.values())


def _check_shapes(own: dict[str, Any], p: Tensor, number: int, names: Iterable[str]) -> None:
    """Raise an error for states that do not fit the parameter: kernels would read beyond their ends."""
    for name in names:
        due = torch.Size(_SHAPES.get(name, p.shape))
        if name in own and own[name].shape != due:
            raise ValueError(f"the state {name!r} of parameter {number} must have shape {tuple(due)}, got {tuple(own[name].shape)}")


def _add_states(own: dict[str, Any], p: Tensor, dtypes: dict[str, torch.dtype]) -> None:
    """Create a parameter's missing states (zeros; ones for beta products), and convert the others to the required dtype and device."""
    for name, dtype in dtypes.items():
        if name in own:
            # A model may have been moved, or the format of states changed.
            if own[name].dtype != dtype or own[name].device != p.device:
                own[name] = own[name].to(dtype=dtype, device=p.device)
            continue
        if name == "step":
            own[name] = torch.zeros(_SHAPES[name], dtype=dtype, device=p.device)
        elif name == "beta_products":
            own[name] = torch.ones(_SHAPES[name], dtype=dtype, device=p.device)
        else:
            own[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def check_gradients(params: list[Tensor], first: int, options: Options) -> None:
    """Raise an error for gradients that are sparse, complex or sharded unlike their parameters, and for unsupported shards.

    Args:
        params: The parameters of a group.
        first: Number of the first of them in the optimizer.
        options: The first arguments of `settings.setting`.
    """
    for number, p in enumerate(params, start=first):
        g = p.grad
        if g is None:
            continue
        if g.layout != torch.strided:
            raise TypeError(f"the gradient of parameter {number} must be dense, got layout {g.layout}")
        if not g.is_floating_point():
            raise TypeError(f"the gradient of parameter {number} must be real, got {g.dtype}")
        is_shard = shards.is_distributed(p)
        if shards.is_distributed(g) != is_shard:
            its, own = ("plain", "distributed") if is_shard else ("distributed", "plain")
            raise TypeError(f"the gradient of parameter {number} is a {its} tensor, the parameter a {own} one")
        if is_shard:
            (shards.place_of if settings.setting(*options, p.dtype).draws else shards.refuse_summands)(p)  # type: ignore[arg-type]


def _local_gradient(g: Tensor | None, p: Tensor) -> Tensor:
    assert g is not None
    return shards.local(shards.placed_as(g, p))


def _on(number: Tensor | None, device: torch.device) -> Tensor | None:
    return None if number is None else number.to(device, non_blocking=True)
