"""Seeds and streams of random bits.

Random bits come from Philox4x32-10, a pure function of (seed, stream, logical element index): nothing is stored and no state advances, so
that any element's bits can be computed independently, on any device. Only the seed is drawn.

The behaviour of layers follows from that, and matters when you measure noise:

- Each call of a layer draws one seed for its inputs and gradients from torch's own generator, as dropout does. So a model with points and
  one without draw different data orders afterwards: give the data loader its own generator.
- A weight's seed follows from its values and from a seed drawn when the layer was created, converted or deep-copied. Until a step changes
  the weight, it is rounded identically at every call. To see the spread of a weight's rounding, call `torch.manual_seed` between two calls
  (in a distributed run the shared seed is agreed on once, and stays fixed).
- Gradients use the seed of the call that they belong to: a second backward pass through the same graph repeats the first. Call the layer
  again for fresh noise.
- Activation checkpointing calls the layer again and restores torch's generator, except with `preserve_rng_state=False`: then
  `act_bwd="same"` is no longer the same rounding.

Example:
    >>> import qsim
    >>> qsim.random.random_bits(4, 6, seed=1)
    tensor([ 1, 56,  3, 57])
    >>> qsim.random.random_bits(2, 6, seed=1, offset=2)
    tensor([ 3, 57])
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import _disable_current_modes

from qsim_kernels import reference

__all__ = ["philox4x32", "random_bits", "shared_seed", "stream"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_LARGEST = 2**63 - 1

# Passed explicitly in every call, because torch's default device may be another; a `torch.device`, because parsing a string is slower.
_CPU = torch.device("cpu")


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Philox4x32 of one counter, in plain Python: the reference for the operators.

    Args:
        counter: Four 32-bit words.
        key: Two 32-bit words.
        rounds: Number of rounds.

    Example:
        >>> from qsim.random import philox4x32
        >>> [hex(word) for word in philox4x32((0, 0, 0, 0), (0, 0))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(c0 * _MULTIPLIERS[0], 1 << 32)
        high1, low1 = divmod(c2 * _MULTIPLIERS[1], 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def stream(*names: str | int) -> int:
    """A separate stream number for a tensor, layer, point or step, hashed from its names.

    Args:
        *names: Strings and integers; their order and kinds matter.

    Returns:
        An integer below 2**63.

    Example:
        >>> import qsim
        >>> qsim.random.stream("encoder.0", "weight", 7) == qsim.random.stream("encoder.0", "weight", 8)
        False
    """
    for name in names:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise TypeError(f"stream: names must be strings and integers, got {name!r}")
    return _hashed(names)


@lru_cache(maxsize=4096)
def _hashed(names: tuple[str | int, ...]) -> int:
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _LARGEST


def random_bits(
    count: int, bits: int, *, seed: int | Tensor, stream: int = 0, offset: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """The random integers that stochastic rounding with `bits` random bits compares for `count` elements.

    Args:
        count: Number of elements.
        bits: Random bits per element, 1 to 32.
        seed: The seed.
        stream: The seed's stream.
        offset: Logical index of the first element.
        device: Where to compute them.

    Returns:
        An int64 tensor of values below `2**bits`.

    Raises:
        TypeError: If an argument is of another kind.
        ValueError: If a number is out of range.

    Example:
        >>> import qsim
        >>> qsim.random.random_bits(3, 32, seed=0)
        tensor([3906276559, 1713873586, 3314386802])
    """
    check_index(stream, offset)
    for name, number in (("count", count), ("bits", bits)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {number!r}")
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must lie in 1…32, got {bits}")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    place = torch.device(device)
    check_source(seed, None, place)
    return reference.random_bits(reference.Noise(int(seed), stream, offset, count, place), bits)


def seed_tensor(seed: int | Tensor | None, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """The seed of one call: the given one, or one drawn from a generator, without waiting for the device.

    Without a generator the seed comes from torch's own CPU generator, so that a run is the same on every device. While a CUDA graph is
    captured or code is compiled it comes from the device's own generator instead, which draws again at every replay.

    Args:
        seed: A 64-bit integer, or a 0-d int64 tensor.
        generator: The generator to draw a seed from if none is given.
        device: The device of the tensor that is rounded.

    Raises:
        TypeError: If the seed or the generator is of another kind.
        ValueError: If both are given, or they do not fit the device.
    """
    compiling = torch.compiler.is_compiling()
    capturing = not compiling and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if seed is None and generator is None:
        return torch.randint(_LARGEST, (), device=device if compiling or capturing else _CPU)
    check_source(seed, generator, device)
    drawn_on_cpu = generator.device.type == "cpu" if generator is not None else isinstance(seed, Tensor) and seed.device.type == "cpu"
    if drawn_on_cpu and capturing:
        raise RuntimeError("every replay of a CUDA graph would reuse what the CPU drew: give a seed or generator on the device, or none")
    if generator is not None:
        return torch.randint(_LARGEST, (), generator=generator, device=generator.device)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64, device=_CPU)


def fresh_seed() -> int:
    """A seed drawn from torch's CPU generator: it repeats after `torch.manual_seed`, and differs from all seeds drawn before."""
    # Models may be created on no device, under a mode in which tensors have no values.
    with _disable_current_modes():
        return int(torch.randint(_LARGEST, (), device=_CPU))


def is_one_of_several() -> bool:
    """Whether this process is one of several in a distributed run."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@lru_cache(maxsize=1)
def _agreed(group: object) -> int:
    """The seed of rank 0, broadcast to all ranks."""
    seed = [stream("shared", torch.initial_seed())]
    distributed.broadcast_object_list(seed, src=0)
    return seed[0]


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
    if distributed.is_available() and distributed.is_initialized():
        return _agreed(distributed.group.WORLD)
    return stream("shared", torch.initial_seed())


def own_rank() -> int:
    """The rank of this process in a distributed run; 0 outside of one."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def rank_stream(number: int, rank: int | None = None) -> int:
    """A per-process stream in a distributed run, derived from a common one by a bijection, so that streams do not collide by accident.

    Args:
        number: The common stream.
        rank: The process, this one by default.
    """
    rank = own_rank() if rank is None else rank
    return number ^ (rank * 0x9E3779B97F4A7C15 & _LARGEST)


class Drawn(NamedTuple):
    """The source of the stream of a layer that was not given one.

    Attributes:
        seed: Drawn when the layer was created, or when its model was converted.
        name: The layer's name among those created with the same seed.
    """

    seed: int
    name: str = ""


# Seeds shared by all processes, by the seeds drawn in this process.
_AGREED: dict[int, int] = {}


def layer_stream(seed: int, name: str) -> int:
    """The stream of a layer that was created with a drawn seed."""
    return stream("layer", _AGREED.get(seed, seed), name)


def agreed_layer_stream(seed: int, name: str) -> int:
    """`layer_stream` of the seed that rank 0 drew instead of this one: all processes must call this in the same order."""
    if seed not in _AGREED and is_one_of_several():
        found = [seed]
        distributed.broadcast_object_list(found, src=0)
        _AGREED[seed] = found[0]
    return stream("layer", _AGREED.get(seed, seed), name)


# The same as torch.compiler.assume_constant_result, which would import the compiler with this module.
for _constant in (layer_stream, agreed_layer_stream):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Place(NamedTuple):
    """The position of a shard's elements in the whole tensor.

    Attributes:
        offset: The index in the whole of the shard's first element.
        row: Number of elements with consecutive indices; 0 if all have.
        stride: From the index of one row's first element to that of the next.
        first: Whether this is the first shard.
    """

    offset: int = 0
    row: int = 0
    stride: int = 0
    first: bool = True


#: The position of a tensor that is not a shard of another.
WHOLE = Place()


def widened(x: Tensor, place: Place, fill: float = 0.0) -> tuple[Tensor, int]:
    """Pad a shard that has a piece of each row to whole rows; return these and the index of the first of them.

    Random bits are keyed on indices in the whole. So such a shard is rounded as part of whole rows, in one call for any number of rows.
    """
    column = place.offset % place.stride
    rows = x.new_full((x.numel() // place.row, place.stride), fill)
    narrowed(rows, place).copy_(x.reshape(-1, place.row))
    return rows, place.offset - column


def narrowed(rows: Tensor, place: Place) -> Tensor:
    """The piece of whole rows that belongs to a shard."""
    column = place.offset % place.stride
    return rows[..., column : column + place.row]


def weight_seed(weight: Tensor, stream_number: int, place: Place = WHOLE) -> Tensor:
    """A seed for a weight's rounding that stays the same until a step changes the weight.

    It is computed from the shared seed, the weight's bits and their positions in the weight. So replicas with the same weight round it
    identically, without communicating, in every micro-batch of a step; after the step they draw again. Nothing is stored, and nothing waits
    for the device.

    Args:
        weight: The weight, or a shard of it.
        stream_number: Distinguishes weights that have the same values.
        place: The position of a shard. The sum of the results of all shards is the seed of the whole.

    Returns:
        A 0-d int64 tensor on the weight's device.
    """
    return torch.ops.qsim.weight_seed.default(weight, stream_number, *place)  # type: ignore[no-any-return]


def _weight_seed(weight: Tensor, stream_number: int, offset: int, row: int, stride: int, first: bool) -> Tensor:
    # All processes must request the shared seed, because they may have to agree on it first.
    constant = stream("weight", shared_seed(), stream_number)
    return torch.ops.qsim.checksum.default(weight, constant if first else 0, offset, row, stride)  # type: ignore[no-any-return]


# An operator, so that compiled code requests the shared seed at every call.
_library = torch.library.Library("qsim", "FRAGMENT")
_library.define(
    "weight_seed(Tensor weight, int stream_number, int offset, int row, int stride, bool first) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("weight_seed", _weight_seed, "CompositeExplicitAutograd")
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
