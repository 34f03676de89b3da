"""Where random bits come from: Philox and how its words are dealt out, streams by name, and who draws the seed."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import qsim
from qsim.random import philox4x32, random_bits, stream
from qsim_kernels.reference.philox import philox
from random123 import ANSWERS, Answer

STOCHASTIC: dict[str, Any] = {"rounding": "stochastic"}


def noisy(x: Tensor, **options: Any) -> Tensor:
    """Stochastic rounding to a format so coarse that two draws of a few dozen elements never agree by chance."""
    return qsim.quantize(x, "e2m1", rounding="stochastic", **options)


@pytest.fixture
def x() -> Tensor:
    """512 values half-way between two of E2M1's."""
    return torch.full((512,), 1.25)


@pytest.mark.parametrize("answer", ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(answer: Answer) -> None:
    assert philox4x32(answer.counter, answer.key) == answer.words
    # Every other implementation has the counter as a block and a stream, and the key as a seed.
    blocks = philox(answer.block, 1, answer.seed, answer.stream, torch.device("cpu"))
    assert blocks.tolist() == [list(answer.words)]


def test_known_answer_reaches_the_elements() -> None:
    # Block 0 of seed 0 and stream 0 has the words of the first answer. Up to 16 bits an element gets half of one, the low half first.
    halves = [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for r in range(1, 17):
        assert random_bits(8, r, seed=0).tolist() == [half >> (16 - r) for half in halves]
    for r in range(17, 33):
        assert random_bits(4, r, seed=0).tolist() == [word >> (32 - r) for word in words]


def test_negative_seed_and_stream_are_their_64_bits() -> None:
    ones = ANSWERS[1]
    # The counter of all ones is the last block of stream -1, which no element's index reaches; its neighbours differ in one word alone.
    for word in (0, 1, 0x80000000, 0xFFFFFFFF):
        counter = (word, 0, *ones.counter[2:])
        assert random_bits(4, 32, seed=-1, stream=-1, offset=4 * word).tolist() == list(philox4x32(counter, ones.key))


@pytest.mark.parametrize("r", [1, 6, 16, 17, 32])
@pytest.mark.parametrize("offset", [0, 1, 3, 4, 7, 8, 13, 2**35 + 5])
def test_any_elements_bits_can_be_computed_alone(r: int, offset: int) -> None:
    whole = random_bits(40, r, seed=3, stream=9, offset=offset)
    for start, count in ((0, 40), (1, 39), (5, 11), (8, 8), (39, 1), (17, 0)):
        part = random_bits(count, r, seed=3, stream=9, offset=offset + start)
        assert part.tolist() == whole[start : start + count].tolist()


def test_seed_stream_and_index_do_not_stand_in_for_each_other() -> None:
    # The same few numbers in every role, in both halves of 64 bits: every element gets bits of its own.
    numbers = (0, 1, 2**32, 2**32 + 1)
    drawn = [
        tuple(random_bits(4, 32, seed=seed, stream=line, offset=4 * block).tolist()) for seed, line, block in product(numbers, repeat=3)
    ]
    assert len(set(drawn)) == len(numbers) ** 3


def test_bits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"bits must lie in 1…32, got 33"):
        random_bits(4, 33, seed=0)
    with pytest.raises(ValueError, match=r"bits must lie in 1…32, got 0"):
        random_bits(4, 0, seed=0)
    with pytest.raises(ValueError, match="offset must not be negative, got -1"):
        random_bits(4, 8, seed=0, offset=-1)


def test_stream_is_stable() -> None:
    # Pinned: a run that is resumed with another version must round as before.
    assert stream("encoder.0", "weight", 7) == 7184249999252198316
    assert stream() == 5694367389426422167
    assert stream(1) == 3390214401120528442
    assert stream("ä") == 3607466003060985972


def test_streams_of_different_names_differ() -> None:
    names: list[tuple[str | int, ...]] = [
        (),
        ("",),
        ("", ""),
        ("a", "b"),
        ("b", "a"),
        ("ab",),
        ("a, b",),
        ("a', 'b",),
        ("a",),
        ("a", 1),
        ("a", "1"),
        ("a1",),
        (1, "a"),
        (1,),
        ("1",),
        (11,),
        (1, 1),
        (-1,),
        (2**64 + 1,),
        ("A",),
        ("a ",),
    ]
    found = [stream(*name) for name in names]
    assert len(set(found)) == len(names)
    assert all(0 <= number < 2**63 for number in found)


def test_stream_takes_strings_and_integers_alone() -> None:
    for wrong in (1.0, True, None, b"a", ("a",)):
        with pytest.raises(TypeError, match="names must be strings and integers, got"):
            stream("a", wrong)  # type: ignore[arg-type]


def test_manual_seed_governs_every_operation(x: Tensor) -> None:
    def draws() -> list[Tensor]:
        torch.manual_seed(11)
        in_place = qsim.quantize_(x.clone(), "e2m1", **STOCHASTIC)
        return [noisy(x), noisy(x, out=torch.empty_like(x)), in_place, qsim.encode(x, "e2m1", **STOCHASTIC), noisy(x)]

    first, second = draws(), draws()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    values = [first[0], first[1], first[2], qsim.decode(first[3], "e2m1"), first[4]]
    assert all(not torch.equal(values[i], values[j]) for i in range(5) for j in range(i))


def test_fork_rng_isolates(x: Tensor) -> None:
    torch.manual_seed(11)
    undisturbed = [noisy(x), noisy(x)]
    torch.manual_seed(11)
    first = noisy(x)
    with torch.random.fork_rng(devices=[]):
        noisy(x)
        torch.manual_seed(99)
        noisy(x)
    assert torch.equal(first, undisturbed[0])
    assert torch.equal(noisy(x), undisturbed[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_same_noise(x: Tensor, use_reentrant: bool) -> None:
    seen: list[Tensor] = []

    def block(values: Tensor) -> Tensor:
        rounded = noisy(values)
        seen.append(rounded.detach().clone())
        return rounded.square()

    leaf = x.clone().requires_grad_()
    checkpoint(block, leaf, use_reentrant=use_reentrant).sum().backward()
    forward, recomputed = seen
    assert torch.equal(forward, recomputed)
    # The gradient is that of what the forward pass saw, and the next call draws anew.
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2 * forward)
    assert not torch.equal(noisy(x), forward)


def test_generator_advances_and_replays(x: Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    a, b = noisy(x, generator=generator), noisy(x, generator=generator)
    assert not torch.equal(a, b)
    generator.set_state(state)
    assert torch.equal(noisy(x, generator=generator), a)
    assert torch.equal(noisy(x, generator=generator), b)


def test_nothing_else_draws_from_torchs_generator(x: Tensor) -> None:
    before = torch.get_rng_state()
    noisy(x, generator=torch.Generator().manual_seed(1))
    noisy(x, seed=1)
    noisy(x, seed=torch.tensor(1))
    for rounding in ("nearest", "nearest_away", "nearest_up", "toward_zero", "up", "down", "odd"):
        qsim.quantize(x, "e2m1", rounding=rounding)
        qsim.encode(x, "e2m1", rounding=rounding)
    assert torch.equal(torch.get_rng_state(), before)
    noisy(x)
    assert not torch.equal(torch.get_rng_state(), before)


def test_generator_stands_still_where_nothing_is_random(x: Tensor) -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    qsim.quantize(x, "e2m1", generator=generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63)])
def test_seed_may_be_a_tensor(x: Tensor, device: torch.device, seed: int) -> None:
    x = x.to(device)
    number = noisy(x, seed=seed)
    for place in {"cpu", device.type}:
        given = torch.tensor(seed, device=place)
        assert torch.equal(noisy(x, seed=given), number)
        assert given.item() == seed
    bits = random_bits(x.numel(), 32, seed=seed)
    # Half-way: the values whose R has its top bit set go up.
    assert torch.equal(number.cpu() == 1.5, bits >= 2**31)


@pytest.mark.parametrize(("name", "number"), [("stream", 1), ("stream", -1), ("stream", 2**62), ("seed", 8), ("seed", 7 - 2**63)])
def test_seed_and_stream_tell_draws_apart(x: Tensor, name: str, number: int) -> None:
    options = {"seed": 7, "stream": 0, name: number}
    assert not torch.equal(noisy(x, **options), noisy(x, seed=7))
    assert torch.equal(noisy(x, **options), noisy(x, **options))


def test_bad_seeds_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match="give seed= or generator=, not both"):
        noisy(x, seed=1, generator=torch.Generator())
    with pytest.raises(TypeError, match=r"seed must be an int or a 0-d int64 tensor, got 1\.5"):
        noisy(x, seed=1.5)
    with pytest.raises(TypeError, match="seed must be an int or a 0-d int64 tensor, got True"):
        noisy(x, seed=True)
    with pytest.raises(ValueError, match=f"seed must fit 64 signed bits, got {2**63}"):
        noisy(x, seed=2**63)
    with pytest.raises(ValueError, match=r"0-d int64 tensor, got torch.int64 of shape \(1,\)"):
        noisy(x, seed=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"0-d int64 tensor, got torch.int32 of shape \(\)"):
        noisy(x, seed=torch.tensor(1, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator, got 3"):
        noisy(x, generator=3)
    with pytest.raises(ValueError, match="offset must not be negative, got -1"):
        noisy(x, seed=1, offset=-1)


@pytest.mark.gpu
def test_manual_seed_governs_the_gpu_alike(x: Tensor) -> None:
    torch.manual_seed(3)
    here = [noisy(x), noisy(x)]
    torch.manual_seed(3)
    there = [noisy(x.cuda()), noisy(x.cuda())]
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.gpu
def test_generator_may_live_on_either_device(x: Tensor) -> None:
    for place in ("cpu", "cuda"):
        generator = torch.Generator(place).manual_seed(5)
        a, b = noisy(x.cuda(), generator=generator), noisy(x.cuda(), generator=generator)
        assert not torch.equal(a, b)
        generator.manual_seed(5)
        assert torch.equal(noisy(x.cuda(), generator=generator), a)
    with pytest.raises(ValueError, match="generator is on cuda"):
        noisy(x, generator=torch.Generator("cuda"))
    with pytest.raises(ValueError, match="seed is on cuda"):
        noisy(x, seed=torch.tensor(1, device="cuda"))


@pytest.mark.gpu
def test_drawing_a_seed_does_not_wait_for_the_gpu(x: Tensor) -> None:
    x = x.cuda()
    noisy(x)  # compiles
    seed = torch.tensor(1, device="cuda")
    for generator in (torch.Generator(), torch.Generator("cuda")):
        noisy(x, generator=generator)
        torch.cuda.set_sync_debug_mode("error")
        try:
            noisy(x)
            noisy(x, seed=3)
            noisy(x, seed=seed)
            noisy(x, generator=generator)
            qsim.encode(x, "e4m3", **STOCHASTIC)
        finally:
            torch.cuda.set_sync_debug_mode("default")
