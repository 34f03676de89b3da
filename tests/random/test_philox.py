"""The source of random bits: Philox, the assignment of its words to elements, and streams by name."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from qsim.random import philox4x32, random_bits, stream
from qsim_kernels.torch.philox import block_words, philox
from support.bounds import check_share
from support.random123 import ANSWERS, KnownAnswer


@pytest.mark.parametrize("answer", ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(answer: KnownAnswer) -> None:
    assert philox4x32(answer.counter, answer.key) == answer.words
    # Other implementations have the counter as a block and a stream, and the key as a seed.
    blocks = philox(answer.block, 1, answer.seed, answer.stream, torch.device("cpu"))
    assert blocks.tolist() == [list(answer.words)]
    assert block_words(answer.block, answer.seed, answer.stream) == answer.words


def test_known_answer_reaches_the_elements() -> None:
    # Block 0 of seed 0 and stream 0 has the words of the first answer. An element's first 16 bits are half of one word, the low half first.
    first = [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]
    for r in range(1, 17):
        assert random_bits(8, r, seed=0).tolist() == [half >> (16 - r) for half in first]
    # The last 16 are those of the block whose number has the 64th bit set.
    last = [half for word in philox4x32((0, 1 << 31, 0, 0), (0, 0)) for half in (word & 0xFFFF, word >> 16)]
    for r in range(17, 33):
        assert random_bits(8, r, seed=0).tolist() == [(a << 16 | b) >> (32 - r) for a, b in zip(first, last, strict=True)]


def test_negative_seed_and_stream_are_their_64_bits() -> None:
    ones = ANSWERS[1]
    # The counter of all ones is the last block of stream -1, which no element's index reaches; its neighbours differ in only one word.
    for word in (0, 1, 0x80000000, 0xFFFFFFFF):
        words = philox4x32((word, 0, *ones.counter[2:]), ones.key)
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        assert random_bits(8, 16, seed=-1, stream=-1, offset=8 * word).tolist() == halves


@pytest.mark.parametrize("r", [1, 6, 16, 17, 32])
def test_bits_are_philox_of_seed_stream_and_index(r: int) -> None:
    seed, stream, start = 0x0123456789ABCDEF, 0x0FEDCBA987654321, 2**35 - 3
    expected = []
    for index in range(start, start + 40):
        block, place = divmod(index, 8)
        halves = []
        for upper in (block >> 32, block >> 32 | 1 << 31):
            counter = (block & 0xFFFFFFFF, upper, stream & 0xFFFFFFFF, stream >> 32)
            words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
            halves.append((words[place // 2] >> (16 * (place % 2))) & 0xFFFF)
        expected.append((halves[0] << 16 | halves[1]) >> (32 - r))
    assert random_bits(40, r, seed=seed, stream=stream, offset=start).tolist() == expected


@pytest.mark.parametrize("r", [1, 6, 16, 17, 32])
@pytest.mark.parametrize("offset", [0, 1, 3, 4, 7, 8, 13, 2**35 + 5])
def test_any_elements_bits_can_be_computed_alone(r: int, offset: int) -> None:
    whole = random_bits(40, r, seed=3, stream=9, offset=offset)
    for start, count in ((0, 40), (1, 39), (5, 11), (8, 8), (39, 1), (17, 0)):
        part = random_bits(count, r, seed=3, stream=9, offset=offset + start)
        assert part.tolist() == whole[start : start + count].tolist()


def test_seed_stream_and_index_do_not_stand_in_for_each_other() -> None:
    # The same few numbers in every role, in both halves of 64 bits: every element gets its own bits.
    numbers = (0, 1, 2**32, 2**32 + 1)
    drawn = [
        tuple(random_bits(8, 32, seed=seed, stream=line, offset=8 * block).tolist()) for seed, line, block in product(numbers, repeat=3)
    ]
    assert len(set(drawn)) == len(numbers) ** 3


@pytest.mark.parametrize("r", [16, 32])
def test_bits_are_fair_and_independent(r: int) -> None:
    # Each bit is a fair coin, and so is its equality with the same bit of the next element, stream or seed.
    count = 2**14
    bits = random_bits(count + 1, r, seed=1)
    others = [bits[1:], random_bits(count, r, seed=1, stream=1), random_bits(count, r, seed=2), torch.zeros(count, dtype=torch.int64)]
    for other in others:
        for i in range(r):
            check_share(int(((bits[:count] ^ other) >> i & 1).sum()), count, 0.5, tests=len(others) * r)


def test_stream_is_stable() -> None:
    # Pinned: a run resumed with another version must round as before.
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
