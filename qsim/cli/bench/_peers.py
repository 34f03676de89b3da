"""Other packages' rounding, timed alternating with qsim on the same tensors.

Results differ: QPyTorch uses the top exponent for values and breaks ties away from zero, for example. The time compared is
the time that a user waits for a new rounded tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import qsim
from qsim.cli.bench._settings import BenchSettings
from qsim.cli.bench._timing import Call, interleaved
from qsim.formats import Float
from qsim.text.records import Values
from qsim.text.tables import Quantity, Row

COLUMNS: Values = {
    "peer": "peer",
    "format": "format",
    "rounding": "rounding",
    "dtypes": "dtypes",
    "peer ms": Quantity("peer_milliseconds", 3),
    "qsim ms": Quantity("milliseconds", 3),
    "qsim GB/s": Quantity("gb_per_s", 1),
    "ratio": Quantity("ratio", 2),
}


@dataclass(frozen=True)
class Duel:
    """The same work done by a peer and by qsim."""

    label: str
    format: str
    rounding: str
    dtypes: str
    bytes: int
    theirs: Call
    ours: Call


def _load_qpytorch() -> Callable[..., torch.Tensor]:
    # This compiles it, with ninja and a C++ compiler.
    from qtorch.quant import float_quantize

    return float_quantize  # type: ignore[no-any-return]


def _load_torchao() -> Callable[..., torch.Tensor]:
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    return _fp32_to_bf16_sr  # type: ignore[no-any-return]


def _load_d9d() -> Callable[..., torch.Tensor]:
    from d9d.kernel.stochastic import copy_fp32_to_bf16_stochastic_

    return copy_fp32_to_bf16_stochastic_  # type: ignore[no-any-return]


def _qpytorch(float_quantize: Callable[..., torch.Tensor], settings: BenchSettings) -> Iterator[Duel]:
    x = settings.normal()
    for name, fmt in settings.formats.items():
        for rounding in settings.roundings:
            # It supports these two roundings, and formats with the usual bias.
            if isinstance(fmt, Float) and rounding in ("nearest", "stochastic"):
                theirs = partial(float_quantize, x, fmt.exponent, fmt.mantissa, rounding)
                ours = partial(qsim.quantize, x, fmt, rounding=rounding)
                yield Duel("QPyTorch", name, rounding, "fp32→fp32", 2 * x.nbytes, theirs, ours)


def _torchao(to_bfloat16: Callable[..., torch.Tensor], settings: BenchSettings) -> Iterator[Duel]:
    x = settings.normal()
    duel = partial(Duel, format="bf16", rounding="stochastic", dtypes="fp32→bf16", bytes=x.nbytes * 3 // 2, ours=_to_bfloat16(x))
    yield duel("torchao", theirs=partial(to_bfloat16, x))
    if settings.device.type == "cuda":
        # As in torchao's own optimizers.
        yield duel("torchao, compiled", theirs=partial(torch.compile(to_bfloat16), x))


def _d9d(copy: Callable[..., torch.Tensor], settings: BenchSettings) -> Iterator[Duel]:
    x = settings.normal()

    def theirs() -> object:
        return copy(torch.empty_like(x, dtype=torch.bfloat16), x)

    yield Duel("d9d", "bf16", "stochastic", "fp32→bf16", x.nbytes * 3 // 2, theirs, _to_bfloat16(x))


def _to_bfloat16(x: torch.Tensor) -> Call:
    return partial(qsim.quantize, x, "bf16", rounding="stochastic", dtype=torch.bfloat16)


@dataclass(frozen=True)
class PeerPackage:
    """A package to compare with.

    Attributes:
        package: The package to install.
        load: Imports it and returns its function.
        duels: Returns the comparisons for this function.
        devices: The devices that it supports.
    """

    package: str
    load: Callable[[], Callable[..., torch.Tensor]]
    duels: Callable[[Callable[..., torch.Tensor], BenchSettings], Iterator[Duel]]
    devices: Sequence[str] = ("cpu", "cuda")


PEERS = {
    "qpytorch": PeerPackage("qtorch", _load_qpytorch, _qpytorch),
    "torchao": PeerPackage("torchao", _load_torchao, _torchao),
    "d9d": PeerPackage("d9d", _load_d9d, _d9d, ("cuda",)),
}


def peers(settings: BenchSettings, names: Sequence[str]) -> Iterator[Row]:
    """Time qsim alternating with each of the peers; missing ones are listed with the package to install."""
    for name in names:
        peer = PEERS[name]
        function = loaded(peer.load, peer.package, peer.devices, settings)
        if isinstance(function, str):
            yield {"part": "peers", "peer": name, "note": function}
            continue
        for duel in peer.duels(function, settings):
            row = {"part": "peers", "peer": duel.label, "format": duel.format, "rounding": duel.rounding, "dtypes": duel.dtypes}
            yield {**row, **raced(interleaved((duel.theirs, duel.ours), settings.clock, settings.repeats), duel.bytes)}


def loaded(load: Callable[[], Any], package: str, devices: Sequence[str], settings: BenchSettings) -> Any:
    """Load a peer, or return the reason why it is not timed, as text."""
    if settings.device.type not in devices:
        return f"runs on {', '.join(devices)} only"
    try:
        return load()
    except ImportError as error:
        return f"not installed (pip install {package}): {error}"


def raced(times: Sequence[float], moved: int) -> Row:
    """The times of a peer and of qsim, and qsim's bandwidth."""
    theirs, ours = times
    milliseconds = {"peer_milliseconds": theirs * 1e3, "milliseconds": ours * 1e3}
    return {**milliseconds, "gb_per_s": moved / ours / 1e9, "ratio": theirs / ours}
