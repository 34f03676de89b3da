"""Other packages' AdamW, timed alternating with qsim's in the matching mode, each on its own parameters.

Both sides do the same work: weights and moments have the same dtypes and are rounded in the same way, with different random bits. Only
torch's step, which cannot round stochastically, is also compared with a stochastic one, to show what that costs. The time
compared is the time that a user waits for a step; if a peer waits for the device within its step, qsim's time on the host counts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from qsim.cli.bench._optim_work import LEARNING_RATE, MakeOptimizer, ParameterSet, adamw, moved, started
from qsim.cli.bench._peers import loaded, raced
from qsim.cli.bench._settings import BenchSettings
from qsim.cli.bench._timing import interleaved
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "peer": "peer",
    "tensors": "tensors",
    "update": "update",
    "states": "states",
    "states rounded": "state_rounding",
    "peer ms": Quantity("peer_milliseconds", 3),
    "qsim ms": Quantity("milliseconds", 3),
    "qsim GB/s": Quantity("gb_per_s", 1),
    "ratio": Quantity("ratio", 2),
}


@dataclass(frozen=True)
class PeerMode:
    """A mode of a peer's steps.

    Attributes:
        update: qsim's name for the update of its weights.
        states: The short name of its moments' dtype.
        options: Its options other than the learning rate.
        state_rounding: qsim's name for the rounding of its moments.
    """

    update: str
    states: str
    options: Mapping[str, Any]
    state_rounding: str = "nearest"


@dataclass(frozen=True)
class PeerOptimizer:
    """An optimizer to compare with.

    Attributes:
        label: Its name in tables.
        package: The package to install.
        module: Its module.
        name: Its name there.
        modes: The modes to compare.
        devices: The devices that it supports.
    """

    label: str
    package: str
    module: str
    name: str
    modes: Sequence[PeerMode]
    devices: Sequence[str] = ("cpu", "cuda")

    def load(self) -> Callable[..., torch.optim.Optimizer]:
        """Import the optimizer class."""
        found: Callable[..., torch.optim.Optimizer] = getattr(import_module(self.module), self.name)
        return found


PEERS = {
    "torch": PeerOptimizer(
        "torch, fused", "torch", "torch.optim", "AdamW", [PeerMode(update, "bf16", {"fused": True}) for update in ("nearest", "stochastic")]
    ),
    "torchao": PeerOptimizer(
        "torchao", "torchao", "torchao.optim", "_AdamW", [PeerMode("stochastic", "bf16", {"bf16_stochastic_round": True})]
    ),
    "optimi": PeerOptimizer("optimi", "torch-optimi", "optimi", "AdamW", [PeerMode("kahan", "bf16", {"kahan_sum": True})]),
    "d9d": PeerOptimizer(
        "d9d",
        "d9d",
        "d9d.optim.stochastic",
        "StochasticAdamW",
        [
            PeerMode("stochastic", "bf16", {"state_dtype": torch.bfloat16}, state_rounding="stochastic"),
            # Stored in float32, the dtype in which they are computed.
            PeerMode("stochastic", "fp32", {"state_dtype": torch.float32}),
        ],
        ("cuda",),
    ),
}


def peers(settings: BenchSettings, sets: Sequence[ParameterSet], names: Sequence[str]) -> Iterator[Row]:
    """Time qsim alternating with each of the peers; missing ones are listed with the package to install."""
    for peer in [PEERS[name] for name in names]:
        row = {"part": "peers", "peer": peer.label}
        make = loaded(peer.load, peer.package, peer.devices, settings)
        if isinstance(make, str):
            yield {**row, "note": make}
            continue
        for tensors in sets:
            for mode in peer.modes:
                yield {**row, **_duel(partial(make, lr=LEARNING_RATE, **mode.options), mode, tensors, settings)}


def _duel(make: MakeOptimizer, mode: PeerMode, tensors: ParameterSet, settings: BenchSettings) -> Row:
    ours = adamw(mode.update, mode.states, state_rounding=mode.state_rounding)
    their, our = started(make, tensors, settings), started(ours, tensors, settings)
    times = interleaved((their.step, our.step), settings.clock, settings.repeats)
    row = {"tensors": tensors.label, "count": len(tensors.shapes), "elements": tensors.elements}
    row |= {"update": mode.update, "states": mode.states, "state_rounding": mode.state_rounding, "bytes": moved(our)}
    return {**row, **raced(times, moved(our))}
