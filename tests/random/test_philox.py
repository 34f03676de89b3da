"""The source of random bits: Philox, the assignment of its words to elements, and streams by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qsim.random import philox4x32, random_bits, stream
from support import philox_oracle
from support.bounds import check_share
from support.random123 import ANSWERS, KnownAnswer


@pytest.mark.parametrize("answer", ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(answer: KnownAnswer) -> None:
    assert philox4x32(answer.counter, answer.key) == philox_oracle.block(answer.counter, answer.key) == answer.words


@pytest.mark.parametrize("bits", [1, 6, 16, 17, 32])
@pytest.mark.parametrize("start", [0, 5, 2**32 - 3, 2**35 - 3])
@pytest.mark.parametrize(("seed", "line"), [(0, 0), (0, 2**32), (2**32, 0), (-1, 5), (-1, -1), (9, -2), (2**62 + 7, 2**63 - 1)])
def test_elements_get_the_oracles_bits(bits: int, start: int, seed: int, line: int) -> None:
    """An element's bits depend on seed, stream and index only, in all 64 bits of each; so any part can be computed alone."""
    expected = philox_oracle.random_integers(40, bits, seed, line, start)
    assert random_bits(40, bits, seed=seed, stream=line, offset=start).tolist() == expected
    assert random_bits(11, bits, seed=seed, stream=line, offset=start + 5).tolist() == expected[5:16]


def test_streams_have_the_oracles_numbers() -> None:
    for names in (("optimizer", 3), ("encoder.0", "weight", 7), ("1",), (1,)):
        assert stream(*names) == philox_oracle.stream(*names)


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


@pytest.mark.parametrize(
    ("counter", "key", "error", "said"),
    [
        ((2**33, 0, 0, 0), (0, 0), ValueError, r"the words of counter must be in 0…2\*\*32 - 1, got 8589934592"),
        ((0, 0, 0, 0), (0, -1), ValueError, r"the words of key must be in 0…2\*\*32 - 1, got -1"),
        ((0, 0, 0), (0, 0), ValueError, r"counter has 4 words, got \(0, 0, 0\)"),
        ((0, 0, 0, 0), (0, 0, 0), ValueError, r"key has 2 words, got \(0, 0, 0\)"),
        ((0, 0, 0, 0.5), (0, 0), TypeError, r"the words of counter must be ints, got 0.5"),
    ],
)
def test_words_of_other_sizes_are_refused(counter: Any, key: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^philox4x32: {said}$"):
        philox4x32(counter, key)
