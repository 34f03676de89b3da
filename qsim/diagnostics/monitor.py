"""A monitor of the effects of rounding at each point of each layer of a model, at intervals during training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from qsim.diagnostics.advice import RUINED_LOST, Advice, advice
from qsim.diagnostics.async_copy import HostCopy
from qsim.diagnostics.block_counts import BlockCounts, BlockSamples
from qsim.diagnostics.cancelled import CancelledUpdates
from qsim.diagnostics.collecting import POINTS, Collector, Label, LayerObserver, PendingSample, Source
from qsim.diagnostics.counts import NO_SAMPLE, Counts, Sample
from qsim.diagnostics.following import BlockFollower, checked_places
from qsim.diagnostics.hooks import Watch
from qsim.diagnostics.updates import Updates
from qsim.diagnostics.writing import log
from qsim.formats import name_of
from qsim.formats.base import check_flag, check_integer
from qsim.functional.arguments import check_model
from qsim.functional.callables import CallablePoint
from qsim.functional.quantizer import Quantizer, short
from qsim.nn import Quantize
from qsim.nn.calls.settings import call_points, own_matrices
from qsim.nn.modules import FivePointModule
from qsim.nn.record import known
from qsim.private import is_compiled
from qsim.recipes.five_point import FivePoint
from qsim.text.files import write_whole
from qsim.text.records import Writer
from qsim.text.warning import warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Monitor:
    """Count the effects of rounding on a model, in every `every`-th step of its training.

    Counts for each point of each layer with points, and of each `qsim.nn.Quantize`: elements that saturated, underflowed to zero, were
    exact already, or were NaN; the ratio of signal to rounding errors; and a histogram of magnitudes over powers of two. It counts the
    numbers that are rounded, after a transform and divided by scales. A point that reuses what the forward pass rounded (`"same"`) rounds
    nothing and is not reported; backward points are counted during the backward pass.

    A step is the time between two calls of `step()`, which should follow the optimizer's; given the `optimizer`, its steps are counted
    automatically. Counts are added up over the micro-batches of a step, and over the calls of a layer that is called several times.
    Recomputation by activation checkpointing is not counted again. Evaluation is not counted: passes under `torch.no_grad()` or
    `torch.inference_mode()`, and those with all layers in eval mode. The first step is sampled. In distributed runs each process counts its
    own shard; if distributed tensors have per-tensor scales, all processes must sample the same steps, because they compute those together.

    `advice()` lists what ruins the run, with remedies. If a sampled step is that bad, one warning says so, once per monitor. Given the
    `optimizer`, this includes updates that round-to-nearest cancels, for which the weights are stored twice in a sampled step.

    A monitor does not change training by a single bit: what a layer rounds is rounded again for the monitor, with the same random bits, and
    no others are drawn. Counts are summed on the device and copied to the host when a sample ends, and nothing waits for that until
    `samples` is read. Between sampled steps the model has no hooks.

    Products outside of layers have the names of their parameters, such as `experts.down_proj`, and those of two activations that of their
    module. Which of them a module computes is up to its code, so none of them is reported as never called.

    Compiled code and replays of CUDA graphs are not watched, because they run no Python: run the steps to be sampled
    eagerly. Functions of `qsim.nn.functional` are counted for the layer that calls them.

    Args:
        model: The converted model. Only one monitor at a time can watch it.
        every: The sampling interval in steps.
        optimizer: The optimizer whose steps are counted.
        writer: The receiver of all samples: a TensorBoard writer, or any object with `add_scalar` and, to receive
            histograms, `add_histogram_raw` or `add_histogram`. For each point it gets the counts of all layers together, and the worst
            layer's shares and SQNR.
        per_layer: Whether the writer also gets the counts of every layer.
        blocks: The number of places whose blocks are followed: in each sample those with the lowest SQNR in the sample before, and in the
            first sample the first ones; or pairs of a layer and a point. `blocks` of the monitor lists what was found.

    Raises:
        TypeError: If `model` is not a module, or another argument has the wrong type.
        ValueError: If it has no layer with points, is compiled, or is watched by another monitor.

    Example:
        >>> import torch, qsim
        >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 1)), qsim.FivePoint(act="e4m3", weight="e2m1"))
        >>> with qsim.diagnostics.Monitor(model, every=10) as monitor:
        ...     y = model(torch.tensor([[1.0, 500.0], [0.0, 1e-9]]))
        ...     monitor.step()
        >>> monitor.samples[0]["0", "act"].shares
        {'saturated': 0.25, 'underflowed': 0.25, 'exact': 0.5, 'nan': 0.0}
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        writer: Writer | None = None,
        per_layer: bool = False,
        blocks: int | Sequence[tuple[str, str]] = 0,
    ) -> None:
        check_model("Monitor", model)
        self.every = check_integer("Monitor", "every", every, 1, 2**62)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"Monitor: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
        check_flag("Monitor", "per_layer", per_layer)
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"Monitor: writer must have add_scalar, as TensorBoard's SummaryWriter has, got {writer!r}")
        self._layers = _watched(model)
        self._places, self._room = checked_places(blocks, [layer.name for layer in self._layers])
        self._pending_blocks: list[tuple[Label, int, HostCopy, HostCopy]] = []
        self._follower: BlockFollower | None = None
        self._watch = Watch([(layer.module, layer.call) for layer in self._layers])
        self._writer, self._per_layer, self._taken, self._has_warned = writer, per_layer, 0, False
        self._quantizers: dict[tuple[str, str, str], Quantizer] = {}
        self._samples: list[Sample] = []
        self._pending: list[PendingSample] = []
        self._collector: Collector | None = None
        self._steps, self._is_closed = 0, False
        self._handle: RemovableHandle | None = None
        self._cancelled = None if optimizer is None else CancelledUpdates(optimizer, every, model)
        if optimizer is not None:
            self._handle = optimizer.register_step_post_hook(lambda *_: self.step())
        self._begin()

    def step(self) -> None:
        """End a step, and begin the next one.

        Raises:
            RuntimeError: If the monitor is closed.
        """
        if self._is_closed:
            raise RuntimeError("Monitor: a closed monitor counts no steps")
        if self._collector is not None:
            self._end(self._collector)
        self._steps += 1
        if self._steps % self.every == 0:
            self._begin()

    def close(self) -> None:
        """Stop counting and remove all hooks from the model and the optimizer. Samples stay, except for an unfinished step."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.close()
        if self._handle is not None:
            self._handle.remove()
        if self._cancelled is not None:
            self._cancelled.close()
        if self._collector is not None:
            self._collector.is_open, self._collector = False, None
        self._arrive(wait=True)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        collector = self._collector = Collector()
        self._follower = self._following()
        self._watch.begin([LayerObserver(collector, number, self._follower) for number in range(len(self._layers))])

    def _end(self, collector: Collector) -> None:
        self._collector = None
        self._watch.end()
        if not collector.tallies:
            warnings.warn(
                f"Monitor: no layer rounded anything in step {self._steps}; "
                "compiled code, replays of CUDA graphs and evaluation are not watched",
                RuntimeWarning,
                stacklevel=3,
            )
        layers = (layer for layer in self._layers if layer.call is None and _rounds(layer.module))
        never = (layer.name for layer in layers if layer.module not in self._watch.called)
        for (number, point), fmt, counts, channels in [] if self._follower is None else self._follower.copies():
            label = self._label(Source(number, POINTS.index(point), fmt))
            self._pending_blocks.append((label, self._steps, counts, channels))
        self._pending.append(PendingSample(self._steps, collector, self._label, tuple(never)))
        self._arrive(wait=False)

    def _following(self) -> BlockFollower | None:
        """The follower of the places that were worst in the last sample that has arrived."""
        if self._places or not self._room:
            return BlockFollower(self._places, 0) if self._places else None
        numbers = {layer.name: number for number, layer in reversed(list(enumerate(self._layers)))}
        worst = self._samples[-1].worst("sqnr")[: self._room] if self._samples else ()
        return BlockFollower([(numbers[counts.layer], counts.point) for counts in worst], self._room - len(worst))

    def _arrive(self, wait: bool) -> None:
        """Take over the samples that have arrived, and pass them on."""
        while self._pending and (wait or self._pending[0].has_arrived):
            self._samples.append(self._pending.pop(0).read())
        for sample in self._samples[self._taken :]:
            self._taken += 1
            if self._writer is not None:
                log(self._writer, sample, self._per_layer)
            if not self._has_warned:
                self._warn(sample)

    def _warn(self, sample: Sample) -> None:
        """Warn about the worst problem of a sample, if it ruins the run."""
        given = self._advice(sample)
        ruinous = [problem for problem in given if problem.ruins and (problem.point != "update" or self._lost_before(sample))]
        if ruinous:
            self._has_warned = True
            warn(f"Monitor: step {sample.step}: {ruinous[0]}; monitor.advice() lists {len(given)} in all")

    def _lost_before(self, sample: Sample) -> bool:
        """Whether almost all updates were lost in the sample before as well: in one step a warm-up may have only begun."""
        before = [entry for entry in self._rounded_updates(sample.step - self.every) if entry.updates]
        return bool(before) and all(entry.lost >= RUINED_LOST for entry in before)

    def _rounded_updates(self, step: int) -> list[Updates]:
        """The counts of updates in a step whose weights are not rounded stochastically."""
        return [] if self._cancelled is None else [entry for entry in self._cancelled.in_step(step) if not entry.is_unbiased]

    def _advice(self, sample: Sample) -> Advice:
        def quantizer(counts: Counts) -> Quantizer | None:
            return self._quantizers.get((counts.layer, counts.point, counts.quantizer))

        return advice(sample, quantizer, self._rounded_updates(sample.step))

    def _label(self, source: Source) -> Label:
        name, module, call = self._layers[source.layer]
        point = POINTS[source.point]
        own: Any = getattr(module, f"{point}_point") if isinstance(module, Quantize) else getattr(_points(module, call), point, None)
        if isinstance(own, CallablePoint):
            return Label(name, point, own.name)
        # Points may have been replaced meanwhile.
        if not isinstance(own, Quantizer) or own.format != source.format:
            return Label(name, point, name_of(source.format))
        label = Label(name, point, short(own, point))
        self._quantizers[label] = own
        return label

    @property
    def steps(self) -> int:
        """Number of finished steps."""
        return self._steps

    @property
    def samples(self) -> Sequence[Sample]:
        """All samples of finished steps; this waits for the device."""
        if self._cancelled is not None:
            self._cancelled.updates  # noqa: B018 (waits for its counts)
        self._arrive(wait=True)
        return tuple(self._samples)

    @property
    def blocks(self) -> BlockSamples:
        """The statistics of the blocks that were followed, by layer, point and step: those of the first call in each; waits for the device.

        Example:
            >>> import torch, qsim
            >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(64, 32)), "mxfp4")
            >>> with qsim.diagnostics.Monitor(model, blocks=[("0", "weight")]) as monitor:
            ...     model(torch.randn(8, 64)).sum().backward()
            ...     monitor.step()
            >>> monitor.blocks["0", "weight", 0].amax.shape
            torch.Size([1, 32, 2])
        """
        pending = self._pending_blocks
        return BlockSamples(
            tuple(BlockCounts.of(*label, step, blocks.read(), channels.read()) for label, step, blocks, channels in pending)
        )

    def summary(self) -> list[dict[str, Any]]:
        """A plain dictionary for each step, layer and point with shares and SQNR, for storage.

        A layer that was never called in a step has one with a note that says so.
        """
        return [entry for sample in self.samples for entry in sample.rows()]

    def table(self, step: int | None = None, *, by: str | None = None, rows: int | None = None) -> str:
        """A table of one sample: the last one, or that of a step.

        Args:
            step: The step of the sample.
            by: The sort key: lowest `"sqnr"` first, or highest share, such as `"saturated"` or `"underflowed"`, first. In the order of
                the model by default.
            rows: Number of rows; all by default.

        Raises:
            ValueError: If that step was not sampled, or the share does not exist.
        """
        chosen = self._sample(step)
        return NO_SAMPLE if chosen is None else chosen.table(by, rows)

    def advice(self, step: int | None = None) -> Advice:
        """The problems that ruin the run in one sample, the worst first, with remedies whose numbers follow from the counts.

        It covers underflow of at least 90 % of the numbers that are not zero; underflow of at least half of them, and saturation, if the
        errors are more than a quarter of the signal (SQNR below 6 dB); gradients that overflow; NaN; and, given the `optimizer`, updates
        of which round-to-nearest loses at least 90 %. The numbers are those of the sample, so look again after a change.

        Args:
            step: The step of the sample; the last one by default.

        Raises:
            ValueError: If that step was not sampled.

        Example:
            >>> import torch, qsim
            >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(2, 1)), qsim.FivePoint(grad="e2m1"))
            >>> monitor = qsim.diagnostics.Monitor(model)
            >>> model(torch.ones(64, 2)).mean().backward()
            >>> monitor.close()
            >>> print(monitor.advice())
            no sample yet: a sample ends with its step, at monitor.step() or at the step of the optimizer given to Monitor
        """
        chosen = self._sample(step)
        return Advice((), None) if chosen is None else self._advice(chosen)

    def _sample(self, step: int | None) -> Sample | None:
        """The sample of a step; the last one by default, if any."""
        samples = {sample.step: sample for sample in self.samples}
        if step is None:
            return samples[max(samples)] if samples else None
        if step not in samples:
            raise ValueError(f"step {step} was not sampled; sampled were {', '.join(map(str, samples)) or 'none'}")
        return samples[step]

    def __str__(self) -> str:
        return self.table()

    def write(self, path: str) -> None:
        """Write all samples to a file, one JSON line each. The file is replaced atomically."""
        write_whole(path, "".join(f"{sample.to_json()}\n" for sample in self.samples))

    def plot_exponents(self, layer: str, step: int | None = None) -> Figure:
        """Plot, for each point of a layer, the distribution of magnitudes over powers of two, with the range of the format.

        Args:
            layer: The layer's name.
            step: The step of the sample; the last one by default.
        """
        from qsim.diagnostics.plots import exponents

        return exponents(self.samples, layer, step)

    def plot_point(self, layer: str, point: str = "act", *, step: int | None = None, ax: Axes | None = None) -> Axes:
        """Plot one point of a layer as `plot_exponents` does, into the given axes or a new figure: see `qsim.plot.monitor`."""
        from qsim.diagnostics.plots import exponents_of_point

        return exponents_of_point(self.samples, layer, point, step, ax)

    def plot_shares(self, layer: str) -> Figure:
        """Plot, for each point of a layer, the shares of saturated and underflowed elements and SQNR over the steps."""
        from qsim.diagnostics.plots import shares

        return shares(self.samples, layer)


class Watched(NamedTuple):
    """A layer, or products outside of layers.

    Attributes:
        name: Its name in reports.
        module: The layer, or the module that has the parameter.
        call: The parameter of the products, an empty name for those of two activations; `None` for a layer.
    """

    name: str
    module: nn.Module
    call: str | None = None


def _watched(model: nn.Module) -> list[Watched]:
    """All that rounds, each once, by the first of its names."""
    for name, module in model.named_modules():
        if is_compiled(module):
            where = f"its module {name!r}" if name else "the model"
            raise ValueError(
                f"Monitor: {where} is compiled, and compiled code is not watched: watch the original model, and run it eagerly"
            )
    found: list[Watched] = []
    for name, module in model.named_modules():
        if isinstance(module, (FivePointModule, Quantize)):
            found.append(Watched(name, module))
        calls = call_points(module)
        if calls is not None:
            found += [Watched(f"{name}.{own}".removeprefix("."), module, own) for own in own_matrices(module)]
            found += [Watched(name, module, "")] if calls.of_activations else []
    if not any(layer.call is not None or _rounds(layer.module) for layer in found):
        raise ValueError("Monitor: the model has no layer with points, so there is nothing to count: convert it first")
    return found


def _points(module: nn.Module, call: str | None) -> FivePoint | None:
    """The points of a layer, or of products outside of layers."""
    rounding = known(module).layer if call is None else known(module).calls
    return None if rounding is None else rounding.points


def _rounds(layer: nn.Module) -> bool:
    return not isinstance(layer, FivePointModule) or not layer.points.is_identity
