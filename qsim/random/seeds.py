"""Seeds: given, drawn from a generator, shared by all processes, or those of weights, which follow from their values."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, distributed

from qsim.random.places import WHOLE, Place
from qsim.random.sources import Stream, found
from qsim.random.streams import LARGEST, stream
from qsim_kernels.ops.direct import DISPATCHED, Operators, operators
from qsim_kernels.private import without_modes

# Passed explicitly in every call, because torch's default device may be another; a `torch.device`, because parsing a string is slower.
_CPU = torch.device("cpu")
_MAY_BE_DISTRIBUTED = distributed.is_available()
#: As many streams as seeds fit 64 signed bits together.
_HALF = LARGEST >> 1


def seed_tensor(seed: int | Tensor | None, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The seed of one call: the given one, or one drawn from a generator, without waiting for the device.

    Without a generator the seed comes from torch's own CPU generator, so that a run is the same on every device. While a CUDA graph is
    captured or code is compiled it comes from the device's own generator instead, which draws again at every replay.

    Args:
        seed: A 64-bit integer, or a 0-d int64 tensor.
        generator: The generator to draw a seed from if none is given.
        device: The device of the tensor that is rounded.

    Raises:
        TypeError: If the seed or the generator has the wrong type.
        ValueError: If both are given, or they do not fit the device.
    """
    if seed is None and generator is None:
        return drawn(device)
    check_source(seed, generator, device)
    drawn_on_cpu = generator.device.type == "cpu" if generator is not None else isinstance(seed, Tensor) and seed.device.type == "cpu"
    if drawn_on_cpu and _repeats(device) and not torch.compiler.is_compiling():
        raise RuntimeError("every replay of a CUDA graph would reuse what the CPU drew: give a seed or generator on the device, or none")
    if generator is not None:
        return torch.randint(LARGEST, (), generator=generator, device=generator.device)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64, device=_CPU)


def drawn(device: torch.device, ops: Operators = DISPATCHED, stream_number: Stream = 0) -> Tensor:
    """A seed from torch's own generator, for a product with some operators; see `seed_tensor`.

    Args:
        device: The device of the product.
        ops: Its operators.
        stream_number: The stream of the layer: layers for which the generator is in the same state get different seeds.
    """
    where = device if _repeats(device, ops) else _CPU
    if not isinstance(stream_number, int):
        seed = torch.randint(LARGEST, (), device=where)
        return torch.ops.qsim.of_stream.default(seed, stream_number.summand, torch.int64)  # type: ignore[no-any-return]
    first = stream_number & _HALF  # an addition would take a call of its own
    return torch.randint(first, first + _HALF, (), device=where) if first else torch.randint(LARGEST, (), device=where)


def _repeats(device: torch.device, ops: Operators = DISPATCHED) -> bool:
    """Whether calls on a device are recorded, to be repeated later."""
    if ops is DISPATCHED and torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def fresh_seed() -> int:
    """A seed drawn from torch's CPU generator: it repeats after `torch.manual_seed`, and differs from all seeds drawn before."""
    # Models may be created on no device, under a mode in which tensors have no values.
    with without_modes():
        return int(torch.randint(LARGEST, (), device=_CPU))


@lru_cache(maxsize=1)
def _agreed(group: object) -> int:
    """The seed of rank 0, broadcast to all ranks."""
    seed = [_shared(torch.initial_seed())]
    distributed.broadcast_object_list(seed, src=0)
    return seed[0]


@lru_cache(maxsize=1)
def _shared(initial_seed: int) -> int:
    """The shared seed that follows from the seed of torch's generator."""
    return stream("shared", initial_seed)


def shared_seed() -> int:
    """A seed that all processes of a run share, however each was seeded.

    It follows from `torch.manual_seed`. In a distributed run it is rank 0's, agreed on at first use by a broadcast to all processes, and
    stays fixed from then on; if only some processes have weights to round, call this on all of them beforehand.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> qsim.random.shared_seed() == qsim.random.stream("shared", 0)
        True
    """
    if _MAY_BE_DISTRIBUTED and distributed.is_initialized():
        return _agreed(distributed.group.WORLD)
    return _shared(torch.initial_seed())


def weight_seed(weight: Tensor, stream_number: Stream, place: Place = WHOLE, ops: Operators | None = None, redraws: bool = False) -> Tensor:
    """A seed for a weight's rounding that stays the same until a step changes the weight.

    It is computed from the shared seed, the weight's bits and their positions in the weight. So replicas with the same weight round it
    identically, without communicating, in every micro-batch of a step; after the step they draw again. Nothing is stored, and nothing waits
    for the device.

    Args:
        weight: The weight, or a shard of it.
        stream_number: Distinguishes weights that have the same values.
        place: The position of a shard. The sum of the results of all shards is the seed of the whole.
        ops: The operators for the weight, if known.
        redraws: Whether to draw at every call instead: a draw from torch's own generator is added.

    Returns:
        A 0-d int64 tensor on the weight's device.
    """
    if redraws:
        return weight_seed(weight, stream_number, place, ops) + drawn(weight.device).to(weight.device, non_blocking=True)
    if not isinstance(stream_number, int):
        number, _, *which = stream_number
        return torch.ops.qsim.weight_seed_in_graph.default(weight, number, *which, *place)  # type: ignore[no-any-return]
    if ops is None:
        ops = operators(weight)
    if ops is DISPATCHED:
        return torch.ops.qsim.weight_seed.default(weight, stream_number, *place)  # type: ignore[no-any-return]
    return _weight_seed(weight, stream_number, *place, ops=ops)


def _weight_seed(
    weight: Tensor, stream_number: int, offset: int, row: int, stride: int, first: bool, ops: Operators = DISPATCHED
) -> Tensor:
    # All processes must request the shared seed, because they may have to agree on it first.
    constant = _of_weight(shared_seed(), stream_number)
    return ops.checksum(weight, constant if first else 0, offset, row, stride)  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def _of_weight(shared: int, stream_number: int) -> int:
    """The initial value of a weight's checksum."""
    return stream("weight", shared, stream_number)


# An operator, so that compiled code requests the shared seed at every call.
_library = torch.library.Library("qsim", "FRAGMENT")
_library.define(
    "weight_seed(Tensor weight, int stream_number, int offset, int row, int stride, bool first) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("weight_seed", _weight_seed, "CompositeExplicitAutograd")
_library.define(
    "weight_seed_in_graph(Tensor weight, Tensor number, bool training, str name, int variation, "
    "int offset, int row, int stride, bool first) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl(
    "weight_seed_in_graph",
    lambda weight, number, training, name, variation, *place: _weight_seed(weight, found(number, training, name, variation), *place),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("qsim::weight_seed_in_graph", lambda weight, *_: weight.new_empty((), dtype=torch.int64), lib=_library)
torch.library.register_fake("qsim::weight_seed", lambda weight, *_: weight.new_empty((), dtype=torch.int64), lib=_library)


def check_source(seed: int | Tensor | None, generator: torch.Generator | None, device: torch.device) -> None:
    """Raise an error for a seed or a generator that is not usable for tensors of a device."""
    if seed is not None and generator is not None:
        raise ValueError("give seed= or generator=, not both: a seed leaves nothing to draw")
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        if generator.device.type not in ("cpu", device.type):
            raise ValueError(f"generator is on {generator.device}, x on {device}: it must be on the same device or on the CPU")
    elif isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise ValueError(f"seed must be an int or a 0-d int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}")
        if seed.device.type != "cpu" and seed.device != device:
            raise ValueError(f"seed is on {seed.device}, x on {device}: it must be on the same device or on the CPU")
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int or a 0-d int64 tensor, got {seed!r}")
    elif not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit 64 signed bits, got {seed}")


def check_index(stream: int, offset: int) -> None:
    """Raise an error for a stream or an offset that is not valid."""
    if stream == 0 and offset == 0:
        return
    for name, number in (("stream", stream), ("offset", offset)):
        if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name} must be an int, got {number!r}")
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{name} must fit 64 signed bits, got {number}")
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
