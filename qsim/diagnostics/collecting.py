"""Collection of counts from layers: summed on the device, copied to the host when the sample ends, read once they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim.diagnostics.async_copy import HostCopy
from qsim.diagnostics.counts import Counts, Sample
from qsim.diagnostics.elements import elements_of
from qsim.diagnostics.following import BlockFollower
from qsim.formats import FP32, Format
from qsim.nn.product.observers import Observer
from qsim.nn.product.sites import Site
from qsim.private import backward_pass, running_node, without_function_modes
from qsim_kernels.numbers import tallies
from qsim_kernels.ops.direct import operators
from qsim_kernels.private import without_modes

#: The order in which points are reported.
POINTS = ("act", "weight", "act_bwd", "weight_bwd", "grad", "grad_w", "output", "bias", "forward", "backward")
#: Points of the forward pass, which activation checkpointing runs twice.
_FORWARD = ("act", "weight", "output", "bias", "forward")


class Tally(NamedTuple):
    """The operator's counts, on their device."""

    format: Format
    counts: Tensor
    sums: Tensor

    def plus(self, other: Tally) -> Tally:
        """The sum of two tallies, as a new one: a tally may be used twice."""
        with aside():
            return self._replace(counts=self.counts + other.counts, sums=self.sums + other.sums)


class Source(NamedTuple):
    """The key of counts: the number of the layer in the model, the number of the point, and the format there."""

    layer: int
    point: int
    format: Format


class Collector:
    """A collector of one sample's tallies, until it is closed."""

    def __init__(self) -> None:
        self.is_open = True
        self.tallies: dict[tuple[Source, torch.device], Tally] = {}

    def add(self, layer: int, point: str, tally: Tally) -> None:
        """Add a tally to those with the same key."""
        if not self.is_open:
            return  # from a backward pass after the end of the sample
        key = Source(layer, POINTS.index(point), tally.format), tally.counts.device
        known = self.tallies.get(key)
        self.tallies[key] = tally if known is None else known.plus(tally)


@contextmanager
def aside() -> Iterator[None]:
    """Compute without gradients, and unseen by modes that observe or change every operator, such as `qsim.fpu`."""
    with torch.no_grad(), without_function_modes(), without_modes():
        yield


class LayerObserver(Observer):
    """An `Observer` of the points of one layer. It repeats the layer's rounding with the same random bits."""

    def __init__(self, collector: Collector, layer: int, follower: BlockFollower | None = None) -> None:
        self._collector, self._layer, self._follower = collector, layer, follower

    @aside()
    def measured(self, site: Site, x: Tensor, seed: Tensor | None) -> Tally:
        """The tally of a tensor that is rounded without scales."""
        point = site.quantizer
        assert point is not None  # points that round nothing are not reported
        if self._follows(site):
            return self._measured_elements(site, x, seed)
        dtype = next(dtype for dtype in (x.dtype, torch.float32, torch.float64) if dtype in point.spelt.holders)
        rounded = site.round_plainly(operators(x), x, seed, dtype)
        return Tally(point.format, *torch.ops.qsim.tally.default(x, rounded, point.format.min, point.format.max))

    def used(self, name: str, measured: Any) -> None:
        """Count a tally."""
        self._collector.add(self._layer, name, measured)

    def rounds(self, site: Site, x: Tensor, seed: Tensor | None, rounded: Tensor | None = None) -> None:
        """Count a tensor."""
        if not self._counts(site.name):
            return
        if rounded is not None:
            self.used(site.name, self._measured_result(x, rounded))
        else:
            self.used(site.name, self.measured(site, x, seed) if site.is_plain else self._measured_elements(site, x, seed))

    @aside()
    def _measured_result(self, x: Tensor, rounded: Tensor) -> Tally:
        """The tally of a tensor that a callable rounded. It has no format, so nothing saturates before float32 does."""
        dtype = torch.promote_types(torch.promote_types(x.dtype, rounded.dtype), torch.float32)
        return Tally(FP32, *torch.ops.qsim.tally.default(x.to(dtype), rounded.to(dtype), FP32.min, FP32.max))

    @aside()
    def _measured_elements(self, site: Site, x: Tensor, seed: Tensor | None) -> Tally:
        """The tally of a tensor that is rounded after a transform or under scales."""
        assert site.quantizer is not None  # points that round nothing are not reported
        fmt = site.quantizer.format
        elements = before, after, scales = elements_of(site, x, seed)
        if self._follower is not None and self._follows(site):
            self._follower.note(self._layer, site, elements, x)
        counts, sums = torch.ops.qsim.tally.default(before, after, fmt.min, fmt.max)
        return Tally(fmt, counts, sums if scales is None else _in_own_units(before, after, scales))

    def _follows(self, site: Site) -> bool:
        return self._follower is not None and self._follower.wants(self._layer, site.name)

    def _counts(self, name: str) -> bool:
        """Whether this is not a forward pass that is recomputed for a backward pass."""
        return self._collector.is_open and not (name in _FORWARD and _is_counted_already())


def _is_counted_already() -> bool:
    """Whether this is a forward pass for a backward pass, whose first run was counted.

    Activation checkpointing recomputes a pass when the backward pass needs a tensor of it. If it is reentrant, the first run had no
    gradients, so it looked like evaluation; it is recomputed by the node of an autograd function that is named after checkpoints.
    """
    if backward_pass() == -1:
        return False
    node = running_node()
    return node is None or "Checkpoint" not in node.name()


def _in_own_units(before: Tensor, after: Tensor, scales: Tensor) -> Tensor:
    """Signal and noise in the units of the tensor: elements times their scales."""
    x, q = before.to(torch.float64), after.to(torch.float64)
    finite = x.isfinite() & q.isfinite()
    sums = x.new_empty(tallies.SUMS)
    sums[tallies.SIGNAL] = torch.where(finite, x * scales, 0.0).square().sum()
    sums[tallies.NOISE] = torch.where(finite, (q - x) * scales, 0.0).square().sum()
    return sums


class Label(NamedTuple):
    """The human-readable name of a place."""

    layer: str
    point: str
    quantizer: str


class PendingSample:
    """A finished sample on its way to the host; nothing blocks until it is read.

    Args:
        step: Number of the step.
        collector: The collector of its counts.
        label: A function that returns the name of a place.
        never_called: The names of the layers that were not called.
    """

    def __init__(self, step: int, collector: Collector, label: Callable[[Source], Label], never_called: tuple[str, ...]) -> None:
        collector.is_open = False
        self._step, self._never_called = step, never_called
        self._labels = {place: label(place) for place, _ in collector.tallies}
        self._parts: list[tuple[list[Source], HostCopy, HostCopy]] = []
        for device in dict.fromkeys(device for _, device in collector.tallies):
            own = {place: tally for (place, where), tally in collector.tallies.items() if where == device}
            counts, sums = (torch.stack([getattr(tally, name) for tally in own.values()]) for name in ("counts", "sums"))
            self._parts.append((list(own), HostCopy(counts), HostCopy(sums)))

    @property
    def has_arrived(self) -> bool:
        """Whether it can be read without blocking."""
        return all(counts.is_here and sums.is_here for _, counts, sums in self._parts)

    def read(self) -> Sample:
        """The sample; blocks until it has arrived."""
        counts: dict[Source, tuple[Tensor, Tensor]] = {}
        for places, rows, sums in self._parts:
            for place, row, own in zip(places, rows.read(), sums.read(), strict=True):
                known = counts.get(place)
                counts[place] = (row, own) if known is None else (known[0] + row, known[1] + own)
        ordered = sorted(counts, key=lambda place: (place.layer, place.point))
        points = tuple(_named(place, self._labels[place], *counts[place]) for place in ordered)
        return Sample(points, self._step, self._never_called)


def _named(source: Source, label: Label, counts: Tensor, sums: Tensor) -> Counts:
    fmt = source.format
    return Counts.of(*label, (fmt.smallest, max(fmt.max, -fmt.min)), counts.tolist(), sums.tolist())
