"""torch.nn's layers with points: each a subclass of its torch module that differs only by `points`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from qsim import private, recipes
from qsim.functional.quantizer import Quantizer
from qsim.functional.tracing import refuse_tracing
from qsim.nn import functional
from qsim.nn.calls.running import paused, running
from qsim.nn.calls.settings import delayed_calls
from qsim.nn.convolutions import convolve
from qsim.nn.histories import RemembersAmaxes, keep_histories, keep_modules, with_histories
from qsim.nn.product.sums import multiplied_by
from qsim.nn.record import InUse, ProductRounding, record_of
from qsim.random import seeds, streams
from qsim.random.streams import Source
from qsim.recipes.five_point import POINTS, FivePoint
from qsim.recipes.points_of import PointsLike, points_of
from qsim.recipes.recipe import Recipe


class FivePointModule(RemembersAmaxes):
    """Base class of layers with points.

    Attributes:
        point_names: The names of the layer's points.
        points: Where the layer rounds.
        stream_source: The stream, or the source it is derived from. A layer without a given stream draws a seed from torch's generator when
            it is created, converted or deep-copied, so no two layers share the noise of their weights.
    """

    point_names: ClassVar[tuple[str, ...]] = POINTS

    def __init__(self, *args: Any, points: PointsLike = None, stream: int | None = None, **options: Any) -> None:
        if stream is not None:
            seeds.check_index(stream, 0)
        for given in args:
            if isinstance(given, (FivePoint, Recipe)) or (isinstance(given, str) and given in recipes.NAMED):
                raise TypeError(f"{type(self).__name__}: points are given by their name, points={given!r}")
        super().__init__(*args, **options)
        source = streams.Drawn.of(seeds.fresh_seed()) if stream is None else stream
        record_of(self).layer = ProductRounding(points_of(points), source)
        for name in POINTS:
            if name not in self.point_names and getattr(self.points, name) not in (None, "same"):
                raise ValueError(f"{type(self).__name__} has no point {name!r}; its points are {', '.join(self.point_names)}")
        self.check_points(self.points)
        self.remember()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, as every module; a module that rounds its own calls does not round this layer's."""
        call = nn.Module.__call__  # not `super()`'s: torch.compile keeps this method, also when the layer is reverted
        return paused(call, self, *args, **kwargs) if running.modules else call(self, *args, **kwargs)

    @classmethod
    def own_points(cls, points: FivePoint) -> FivePoint:
        """The subset of points that a layer of this kind has: the points themselves if it has all, so that layers share their plans."""
        if len(cls.point_names) == len(POINTS):
            return points.with_own_modules()
        own = FivePoint(**{name: getattr(points, name) for name in (*cls.point_names, "accumulate", "chip", "backward_of")})
        return own.with_own_modules()

    @classmethod
    def check_points(cls, points: FivePoint) -> None:
        """Raise an error for points that a layer of this kind cannot have."""

    @property
    def points(self) -> FivePoint:
        """The points; modules in them are parts of the layer, named after their point."""
        points: FivePoint = self.__dict__["_qsim"].layer.points
        return points

    @points.setter
    def points(self, points: FivePoint) -> None:
        self.__dict__["_qsim"].layer.points = points
        keep_modules(self, points)

    @property
    def stream_source(self) -> Source:
        """The stream that the layer was given, or the source of the one that it draws."""
        source: Source = self.__dict__["_qsim"].layer.source
        return source

    @stream_source.setter
    def stream_source(self, source: Source) -> None:
        record_of(self).layer = ProductRounding(self.points, source)

    @property
    def stream(self) -> int:
        """The stream that separates the weight's random bits from those of other weights with the same values.

        In training, all processes of a distributed run use the one that rank 0 drew.
        """
        return streams.stream_of(self.stream_source, self.training)

    @stream.setter
    def stream(self, number: int) -> None:
        self.stream_source = number

    @property
    def in_use(self) -> InUse:
        """The points, with their histories if they have any, and the stream."""
        rounding: ProductRounding = self.__dict__["_qsim"].layer
        points, known = rounding.points, rounding.in_use
        if points.is_delayed:
            if "" not in known or known[""][0] is not points:
                self.remember()
                known[""] = points, with_histories(self, points)
            points = known[""][1] or points
        return InUse(points, rounding.stream(self.training))

    def remember(self) -> None:
        """Create the histories that the points need, and drop all others; make the modules in points parts of the layer."""
        keep_modules(self, self.points)
        keep_histories(self, {name: getattr(self.points, name) for name in self.point_names} | delayed_calls(self))

    def extra_repr(self) -> str:
        """The layer's parameters, its points, and what computes its products if they have an accumulator."""
        weight = getattr(self, "weight", None)
        by = multiplied_by(self.in_use.points, weight) if isinstance(weight, Tensor) else ""
        return ", ".join(
            part for part in (super().extra_repr(), f"points=({self.points})", by and f"products of this size by: {by}") if part
        )


class Linear(FivePointModule, nn.Linear):
    """`torch.nn.Linear` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.Linear(4, 2, points=qsim.FivePoint(act="e4m3", grad="e5m2"))
        Linear(in_features=4, out_features=2, bias=True, points=(act=e4m3, grad=e5m2))
    """

    def forward(self, input: Tensor) -> Tensor:
        """The rounded product."""
        points, stream = self.in_use
        return functional.linear(input, self.weight, self.bias, points, stream=stream)


class _ConvolutionModule(FivePointModule):
    """Base class of convolutions: torch's classes compute in `_conv_forward`, after every kind of padding."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        module: Any = self
        padding = module.padding
        padded = input
        if module.padding_mode != "zeros":
            padded = nn.functional.pad(input, _paddings(module), mode=module.padding_mode)
            padding = 0
        numbers = (module.stride, padding, module.dilation, module.groups)
        return convolve(len(module.kernel_size), padded, weight, bias, *numbers, *self.in_use)


def _paddings(module: Any) -> list[int]:
    """The padding at both ends of each dimension, from the last one on, as `torch.nn.functional.pad` takes it."""
    total = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
    ends = {"same": [(size // 2, size - size // 2) for size in total], "valid": [(0, 0)] * len(total)}
    chosen = ends[module.padding] if isinstance(module.padding, str) else [(size, size) for size in module.padding]
    return [size for pair in reversed(chosen) for size in pair]


class Conv1d(_ConvolutionModule, nn.Conv1d):
    """`torch.nn.Conv1d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.Conv1d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8)).shape
        torch.Size([1, 2, 6])
    """


class Conv2d(_ConvolutionModule, nn.Conv2d):
    """`torch.nn.Conv2d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.Conv2d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 2, 6, 6])
    """


class Conv3d(_ConvolutionModule, nn.Conv3d):
    """`torch.nn.Conv3d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.Conv3d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8, 8, 8)).shape
        torch.Size([1, 2, 6, 6, 6])
    """


class _TransposedConvolution(FivePointModule):
    """Base class of transposed convolutions."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The rounded transposed convolution."""
        module: Any = self
        if not self.points.is_identity:
            refuse_tracing("layers with points", input, has_points=True)
        if module.padding_mode != "zeros":
            raise ValueError(f"transposed convolutions pad with zeros only, got padding_mode={module.padding_mode!r}")
        dims = module.weight.dim() - 2
        output_padding = module.output_padding if output_size is None else private.output_padding(module, input, output_size)
        numbers = (module.stride, module.padding, module.dilation, module.groups)
        return convolve(dims, input, module.weight, module.bias, *numbers, *self.in_use, output_padding)


class ConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.ConvTranspose1d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8)).shape
        torch.Size([1, 2, 10])
    """


class ConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.ConvTranspose2d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 2, 10, 10])
    """


class ConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` rounded at five points.

    Example:
        >>> import torch, qsim
        >>> layer = qsim.nn.ConvTranspose3d(1, 2, 3, points=qsim.FivePoint(weight="e4m3"))
        >>> layer(torch.zeros(1, 1, 8, 8, 8)).shape
        torch.Size([1, 2, 10, 10, 10])
    """


class Embedding(FivePointModule, nn.Embedding):
    """`torch.nn.Embedding` with its table rounded forward, at the point `weight`, and its gradient backward, at `grad`.

    An accumulator of the weight's gradient sums that of each row over its occurrences.

    Example:
        >>> import torch, qsim
        >>> qsim.nn.Embedding(10, 3, points=qsim.FivePoint(weight="e4m3"))
        Embedding(10, 3, points=(weight=e4m3))
    """

    # A lookup has no input to round, and its backward pass has no products.
    point_names = ("weight", "grad")

    @classmethod
    def own_points(cls, points: FivePoint) -> FivePoint:
        """The two points and the accumulator of the gradient.

        Transforms cancel only in a product, and a lookup is not a product. An accumulator adds numbers without scales, so gradients that
        have scales are summed by torch.
        """
        own = {name: getattr(points, name) for name in cls.point_names}
        plain: dict[str, Any] = {
            name: replace(point, transform=None) if isinstance(point, Quantizer) else point for name, point in own.items()
        }
        accumulator = None if isinstance(points.grad, Quantizer) and points.grad.scale is not None else points.sums[2]
        return FivePoint(**plain, accumulate=accumulator and (None, None, accumulator)).with_own_modules()

    def forward(self, input: Tensor) -> Tensor:
        """The rounded rows."""
        if self.points.is_identity:
            return super().forward(input)
        if self.max_norm is not None or self.sparse:
            raise ValueError("Embedding: max_norm and sparse=True cannot be combined with points")
        points, stream = self.in_use
        by_freq = self.scale_grad_by_freq
        return functional.embedding(input, self.weight, self.padding_idx, points, scale_grad_by_freq=by_freq, stream=stream)
