"""Rounding on the wires of FSDP2: weights that are gathered, and gradients that are added and scattered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from qsim.distributed.all_reduce import AllReduce, check_how
from qsim.distributed.processes import reduce_scatter
from qsim.functional.quantizer import Point, Quantizer
from qsim.functional.whole_scales import rounded_under, scales_from, without_whole
from qsim.random import streams
from qsim.random.noise import Noise
from qsim.scaling import Given, PerBlock, PerRow, PerTensor, PerTile


class FSDPWire:
    """Rounding on the wires of a model that `fully_shard` has sharded: a policy for `attach`.

    Weights are rounded by the rank that has the shard, before they are gathered, as in torchao's FP8 all-gather: all ranks multiply by
    rounded weights, and optimizers update those that were not. Matrices and larger parameters are rounded, in float32; vectors, such as
    biases, are not. Scales are those of the whole parameter, and random bits follow from the index in it and are drawn again when it has
    changed: any number of ranks gets the same bits. Gradients are divided by the number of ranks, as torch does, and added by
    `reduce_scatter`.

    Args:
        weights: The rounding of weights: a `Quantizer`, a format or a block format; `None` for none.
        gradients: How gradients are added; `None` for torch's reduce-scatter.
        seed: The seed of all random bits, the same in all processes.

    Raises:
        TypeError: If `gradients` is something else.
        ValueError: If weights are rounded under scales that do not follow from the rows of a parameter.

    Example:
        >>> import torch, qsim
        >>> from torch import distributed
        >>> from torch.distributed.fsdp import fully_shard
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = distributed.init_device_mesh("cpu", (1,))
        >>> model = fully_shard(torch.nn.Linear(32, 4), mesh=mesh)
        >>> wire = qsim.distributed.FSDPWire("mxfp8", qsim.distributed.AllReduce("ring", wire="bf16"))
        >>> wire.attach(model)  # with a single process, nothing is sent
        >>> distributed.destroy_process_group()
        >>> wire.gathered("weight", torch.full((1, 32), 0.3))[0, 0]
        tensor(0.3125)
    """

    def __init__(self, weights: Point = None, gradients: AllReduce | None = None, *, seed: int = 0) -> None:
        self.weights = None if weights is None else _checked(weights)
        if gradients is not None:
            check_how("FSDPWire", gradients)
        self.gradients, self._seed = gradients, seed
        self._groups: dict[str, _Group] = {}

    def attach(self, model: nn.Module) -> None:
        """Round what a model sends from now on. Call it once, after `fully_shard`.

        Raises:
            TypeError: If `fully_shard` has not sharded the model.
            ValueError: If parameters are not sharded along their first dimension on a mesh with one dimension, or shards cut tiles.
        """
        from torch.distributed.fsdp import FSDPModule

        modules: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        if not modules:
            raise TypeError(f"FSDPWire: attach needs a model that fully_shard has sharded, got {type(model).__name__}")
        found = {name: _Group(self, name, module) for name, module in modules.items()}
        for group in found.values():
            group.check()
        self._groups = {name: group for name, group in found.items() if group.parameters()}
        for name, group in self._groups.items():
            if self.weights is not None:
                modules[name].set_custom_all_gather(group.gathering)
            if self.gradients is not None:
                modules[name].set_custom_reduce_scatter(group.scattering)

    def gathered(self, name: str, weight: Tensor, version: int = 0) -> Tensor:
        """A parameter as every rank gets it: what any number of ranks compute together, in one process.

        Args:
            name: The parameter's name in the model.
            weight: The whole parameter.
            version: How often it has changed since the first pass.
        """
        if self.weights is None or weight.dim() < 2:
            return weight
        whole, under = without_whole(self.weights)
        scale = None if whole is None else scales_from(_amax(weight), self.weights, whole)
        return _rounded(weight.detach(), under, scale, self.noise(name, version))

    def noise(self, name: str, version: int, offset: int = 0) -> Noise | None:
        """The random bits of a parameter from an index on, if any are drawn."""
        if self.weights is None or not self.weights.spelt.is_stochastic:
            return None
        return Noise(self._seed, streams.stream("fsdp", "weight", name, version), offset)

    def seed_of(self, module: str, call: int) -> int:
        """The seed of the reduce-scatter of a sharded module's gradients, by the number of the call, for `simulate_reduce_scatter`."""
        return streams.stream("fsdp", self._seed, module, call)

    def state_dict(self) -> dict[str, Any]:
        """The state of random bits, and this process's errors, to resume with."""
        return {"seed": self._seed, "groups": {name: group.state() for name, group in self._groups.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict` of the same process; call it after `attach`, with the same model and its weights loaded.

        Raises:
            ValueError: If the model has other sharded modules.
        """
        if state["groups"].keys() != self._groups.keys():
            given, own = (", ".join(map(repr, names)) for names in (state["groups"], self._groups))
            raise ValueError(f"FSDPWire: the state has the sharded modules {given or 'none'}, and the model has {own or 'none'}")
        self._seed = state["seed"]
        for name, group in self._groups.items():
            group.resume(state["groups"][name])


class _Group:
    """The parameters that FSDP2 sends together: those of a sharded module, without those of sharded modules in it."""

    def __init__(self, wire: FSDPWire, name: str, module: nn.Module) -> None:
        self.wire, self.name, self._module = wire, name, module
        self.gathering, self.scattering = _Gathering(self), _Scattering(self)
        self.calls = 0
        self.residual: Tensor | None = None
        self._versions: dict[str, tuple[tuple[int, int], int]] = {}

    def parameters(self) -> dict[str, Any]:
        """The sharded parameters by their names in the model, in FSDP2's order."""
        from torch.distributed.tensor import DTensor

        found: dict[str, Any] = {}
        seen: set[int] = set()
        for name, module in _inner(self.name, self._module):
            for key, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor) and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"{name}.{key}".removeprefix(".")] = parameter
        return found

    def check(self) -> None:
        """Raise an error for parameters whose shards cannot be rounded like the whole."""
        point = self.wire.weights
        for name, parameter in self.parameters().items():
            mesh, placements = parameter.device_mesh, parameter.placements
            if mesh.ndim != 1 or not placements[0].is_shard(0):
                got = f"got {placements} on {mesh}"
                raise ValueError(f"FSDPWire: {name} must be sharded along its first dimension, on a mesh with one dimension, {got}")
            rows = -(-parameter.shape[0] // mesh.size())
            height = point.scale.height if point is not None and isinstance(point.scale, PerTile) and parameter.dim() == 2 else 1
            if rows % height and rows < parameter.shape[0]:
                raise ValueError(f"FSDPWire: {name}: tiles have {height} rows and shards {rows}: each shard must hold whole tiles")

    def version(self, name: str, parameter: Any) -> int:
        """Count the changes of a parameter since the first pass."""
        counters = _counters(parameter)
        known, count = self._versions.get(name, (counters, 0))
        count += known != counters
        self._versions[name] = counters, count
        return count

    def state(self) -> dict[str, Any]:
        residual = None if self.residual is None else self.residual.clone()
        own = self.parameters()
        return {"calls": self.calls, "residual": residual, "versions": {name: self.version(name, own[name]) for name in self._versions}}

    def resume(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        self.residual = None if state["residual"] is None else state["residual"].clone()
        own = self.parameters()
        self._versions = {name: (_counters(own[name]), count) for name, count in state["versions"].items()}


class _Comm:
    """The part of FSDP2's interface that all communication shares."""

    def __init__(self, group: _Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gathering(_Comm):
    """An all-gather of rounded weights, in the interface of `FSDPModule.set_custom_all_gather`."""

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        for name, parameter, buffer in self._buffers(input_tensor):
            buffer.copy_(self._shard(name, parameter, group))
        return distributed.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

    def _buffers(self, flat: Tensor) -> Iterator[tuple[str, Any, Tensor]]:
        """The matrices among the parameters, each with its part of a buffer."""
        own = self._group.parameters()
        sizes = [-(-x.shape[0] // x.device_mesh.size()) * x.shape[1:].numel() for x in own.values()]
        locals_ = [x.to_local() for x in own.values()]
        if sum(sizes) != flat.numel():
            raise RuntimeError(
                f"FSDPWire: {self._group.name or 'the model'} sends {flat.numel()} elements, and its shards have {sum(sizes)}: "
                "fully_shard with several modules at once, or reshard_after_forward with a number, is not emulated"
            )
        for (name, parameter), local, part in zip(own.items(), locals_, flat.split(sizes), strict=True):
            part = part[: local.numel()].view(local.shape)
            if not torch.equal(part.nan_to_num(), local.to(part.dtype).nan_to_num()):
                raise RuntimeError(f"FSDPWire: FSDP2 sends something else than {name} at its place")
            if parameter.dim() > 1:
                yield name, parameter, part

    def _shard(self, name: str, parameter: Any, group: Any) -> Tensor:
        """The shard of a parameter, rounded like the whole."""
        wire, local = self._group.wire, parameter.to_local()
        point = wire.weights
        assert point is not None  # else nothing is gathered here
        whole, under = without_whole(point)
        scale = None
        if whole is not None:
            amax = _amax(local)
            distributed.all_reduce(amax, distributed.ReduceOp.MAX, group=group)
            scale = scales_from(amax, point, whole)
        first = distributed.get_rank(group) * -(-parameter.shape[0] // parameter.device_mesh.size()) * parameter.shape[1:].numel()
        return _rounded(local, under, scale, wire.noise(name, self._group.version(name, parameter), first))


class _Scattering(_Comm):
    """A reduce-scatter with rounding, in the interface of `FSDPModule.set_custom_reduce_scatter`."""

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        if op not in (distributed.ReduceOp.AVG, distributed.ReduceOp.SUM):
            raise ValueError(f"FSDPWire: gradients are summed or averaged, and a reduction by {op} is not emulated")
        own, how = self._group, self._group.wire.gradients
        assert how is not None  # else nothing is added here
        x = input_tensor / distributed.get_world_size(group) if op == distributed.ReduceOp.AVG else input_tensor
        if how.error_feedback and own.residual is None:
            own.residual = torch.zeros(x.numel(), dtype=torch.float32, device=x.device)
        seed = own.wire.seed_of(own.name, own.calls)
        output_tensor.copy_(reduce_scatter(x, how, seed=seed, residual=own.residual, group=group).view(output_tensor.shape))
        own.calls += 1


def _inner(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it that are not sharded by themselves, inner ones first, as FSDP2 lists them."""
    from torch.distributed.fsdp import FSDPModule

    for key, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _inner(f"{name}.{key}".removeprefix("."), child)
    yield name, module


def _checked(given: Any) -> Quantizer:
    """A point for weights that shards of rows can be rounded at like the whole."""
    point = given if isinstance(given, Quantizer) else Quantizer(given)
    scale = point.scale
    if scale is None or isinstance(scale, (PerTensor, PerTile, Given)) or (isinstance(scale, (PerRow, PerBlock)) and scale.dim == -1):
        return point
    raise ValueError(
        "FSDPWire: weights: a rank has rows of a weight: give 'tensor', PerRow(), PerBlock(size), PerTile(height, width) or Given(value), "
        f"got scale={scale!r}"
    )


def _counters(parameter: Any) -> tuple[int, int]:
    """Torch's counters of changes, of a distributed parameter and of its shard: in-place operations count on either."""
    return parameter._version, parameter.to_local()._version


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude of a shard; zero if it is empty, and infinity instead of a NaN, which collectives may lose."""
    amax = x.detach().abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    return amax.nan_to_num(torch.inf, torch.inf).view(1)


def _rounded(x: Tensor, under: Quantizer, scale: Tensor | None, noise: Noise | None) -> Tensor:
    if not x.numel():
        return x
    return under(x, seed=noise) if scale is None else rounded_under(x, under, scale, noise)
