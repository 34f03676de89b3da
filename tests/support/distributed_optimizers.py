"""Low-precision optimizers in distributed runs: weights in every layout with the same gradients, and a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed, nn

from qsim import Quantizer, Stochastic
from qsim.optim import SGD, AdamW, Quantized, StochasticAdamW
from support.comparing import same_bits
from support.distributed_models import TensorParallelBlock, coarse, mesh_of, parallelized, shared_as, whole

# The seed of the first rank only: see `ranks`.
SEED = 1
#: All that `Quantized` rounds, in place or with copies of the weights.
NOISY: dict[str, Any] = {
    "weight": Quantizer("e4m3", "stochastic"),
    "grad": Quantizer("e5m2", Stochastic(bits=6)),
    "state": Quantizer("e5m2", "stochastic"),
}
COPIES: dict[str, Any] = {**NOISY, "accumulator": Quantizer("bf16", "stochastic")}


def _in_groups(params: Iterable[Tensor]) -> AdamW:
    """Both kinds of update in one model, as in Figure 5 of *Revisiting BFloat16 Training*."""
    params = list(params)
    return AdamW([{"params": params[:3], "update": "kahan"}, {"params": params[3:], "lr": 2.0**-5, "weight_decay": 0.25}], 2.0**-7)


MAKERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda params: AdamW(params, 2.0**-7),
    "rounded states": lambda params: AdamW(params, 2.0**-7, amsgrad=True, state_rounding="stochastic"),
    "Kahan": lambda params: AdamW(params, 2.0**-7, update="kahan", state_rounding="stochastic"),
    "groups": _in_groups,
    "E4M3": lambda params: AdamW(params, 2.0**-5, format="e4m3", state="e5m2", state_rounding="stochastic"),
    "in the format": lambda params: AdamW(params, 2.0**-7, (0.9, 0.996), arithmetic="format"),
    "float32 states": lambda params: StochasticAdamW(params, 2.0**-7),
    "SGD": lambda params: SGD(params, 2.0**-7, momentum=0.75, weight_decay=2.0**-7, nesterov=True),
    "SGD, Kahan": lambda params: SGD(params, torch.tensor(2.0**-7), momentum=0.75, update="kahan", state_rounding="stochastic"),
    "Quantized AdamW": lambda params: Quantized(torch.optim.AdamW(params, 2.0**-5), **NOISY),
    "Quantized Adagrad": lambda params: Quantized(torch.optim.Adagrad(params, 2.0**-3), **NOISY),
    "Quantized, copies": lambda params: Quantized(torch.optim.SGD(params, 2.0**-3, momentum=0.75), **COPIES),
}


def net_of(device: torch.device, layout: str = "whole") -> nn.Module:
    """Weights in bfloat16: 33 rows or columns are sharded unevenly, and most processes get nothing of a single row.

    Args:
        device: Their device.
        layout: `"whole"`; or of all processes of a run `"fsdp"` or `"tp"`; or in two rows of processes `"hsdp"` or `"fsdp over tp"`.
    """
    from torch.distributed.fsdp import fully_shard

    net: nn.Module = nn.Sequential(TensorParallelBlock(hidden=33))
    net.register_parameter("row", nn.Parameter(torch.empty(1, 3)))
    net.to(device, torch.bfloat16)
    with torch.no_grad():
        for number, p in enumerate(net.parameters()):
            p.copy_(coarse(*p.shape, seed=number))
    if layout == "whole":
        return net
    mesh = mesh_of(device) if layout in ("fsdp", "tp") else mesh_of(device, 2, distributed.get_world_size() // 2)
    if "tp" in layout:
        net = parallelized(net, mesh["tensor"], sequence=False)
    if layout != "tp":
        fully_shard(net, mesh=mesh["data"] if layout == "fsdp over tp" else mesh)
    return net


def optimizer_of(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that draws its seed as the first number after seeding, however many were drawn for the model."""
    torch.manual_seed(torch.initial_seed())
    return MAKERS[kind](net.parameters())


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> dict[str, Tensor]:
    """Take steps with the gradients of their numbers, and return the results."""
    for step in which:
        for number, p in enumerate(net.parameters()):
            p.grad = shared_as(0.3 * coarse(*p.shape, seed=1000 + 100 * step + number), p)
        optimizer.step()
    return results(net, optimizer)


def results(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and states by their names, unsharded, and the groups' seeds."""
    saved = optimizer.state_dict()
    seeds = [group.get("seed", group.get("quantized_seed")) for group in saved["param_groups"]]
    found = {f"seed {number}": torch.tensor(seed) for number, seed in enumerate(seeds)}
    numbers = {p: number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for name, p in net.named_parameters():
        found[name] = whole(p)
        found |= {f"{name} {role}": whole(value) for role, value in saved["state"].get(numbers.get(p), {}).items()}
    return found


@lru_cache(maxsize=32)
def alone(kind: str, count: int, seed: int = SEED) -> dict[str, Tensor]:
    """The results of a single, independent process on a CPU."""
    net = net_of(torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return steps(net, optimizer_of(kind, net), range(count))


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of values that differ in any bit."""
    return sorted(name for name in found.keys() | expected.keys() if not _same(found.get(name), expected.get(name)))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and same_bits(a, b)


def mixed_groups(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters in bfloat16, one of them distributed and one plain, and the same as plain ones."""
    from torch.distributed.tensor import Shard, distribute_tensor

    values = [coarse(5, 3, seed=0).to(device, torch.bfloat16), coarse(3, seed=1).to(device, torch.bfloat16)]
    spread = nn.Parameter(distribute_tensor(values[0], mesh_of(device), [Shard(0)]))
    return [spread, nn.Parameter(values[1].clone())], [nn.Parameter(x.clone()) for x in values]
