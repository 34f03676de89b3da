"""A tokenizer of byte pairs (Sennrich et al., 2016), learnt from the text that it splits."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

#: Tokens are parts of these, as GPT-2's: letters, digits or signs, each with a space in front, or white space.
WORDS = re.compile(rb" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s")
#: The bytes at the beginning from which pairs are learnt.
_LEARNT_FROM = 6_000_000

Pair = tuple[int, int]


def tokenized(content: bytes, count: int) -> NDArray[np.int32]:
    """A text in tokens: the 256 bytes, and pairs of tokens that are frequent at its beginning.

    Args:
        content: The text.
        count: The number of tokens to choose from; fewer are learnt if no pair occurs twice.

    Example:
        >>> tokenized(b"low lower lowest", 258).tolist()
        [257, 32, 257, 101, 114, 32, 257, 101, 115, 116]
    """
    pairs = learnt(Counter(WORDS.findall(content[:_LEARNT_FROM])), count)
    words = WORDS.findall(content)
    parts = {word: np.array(_split(word, pairs), dtype=np.int32) for word in set(words)}
    return np.concatenate([parts[word] for word in words])


def learnt(words: Mapping[bytes, int], count: int) -> dict[Pair, int]:
    """The pairs that become tokens, in the order in which they do: always the most frequent one, the smallest of equals.

    Args:
        words: How often each word occurs.
        count: The number of tokens, of which the first 256 are bytes.
    """
    spelt, often = [list(word) for word in words], list(words.values())
    seen: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for place, tokens in enumerate(spelt):
        for pair in pairwise(tokens):
            seen[pair] += often[place]
            places[pair].add(place)
    # Counts in the heap may be too large: a pair whose count has fallen is put back when it comes up.
    heap = [(-number, pair) for pair, number in seen.items()]
    heapq.heapify(heap)
    found: dict[Pair, int] = {}
    while heap and len(found) < count - 256:
        number, best = heapq.heappop(heap)
        if -number != seen[best]:
            if seen[best] > 1:
                heapq.heappush(heap, (-seen[best], best))
            continue
        if number > -2:
            break
        found[best] = 256 + len(found)
        grown: set[Pair] = set()
        for place in places.pop(best):
            before, after = spelt[place], _merged(spelt[place], best, found[best])
            spelt[place] = after
            for pair in pairwise(before):
                seen[pair] -= often[place]
            for pair in pairwise(after):
                seen[pair] += often[place]
                places[pair].add(place)
                if found[best] in pair:
                    grown.add(pair)
        for pair in grown:
            heapq.heappush(heap, (-seen[pair], pair))
    return found


def _split(word: bytes, pairs: Mapping[Pair, int]) -> list[int]:
    """A word in tokens: pairs are merged in the order in which they were learnt."""
    tokens = list(word)
    while True:
        first = min((pair for pair in pairwise(tokens) if pair in pairs), key=pairs.__getitem__, default=None)
        if first is None:
            return tokens
        tokens = _merged(tokens, first, pairs[first])


def _merged(tokens: list[int], pair: Pair, token: int) -> list[int]:
    merged: list[int] = []
    for each in tokens:
        # A token that has just been merged is none of the pair's: tokens are made of earlier ones.
        if merged and (merged[-1], each) == pair:
            merged[-1] = token
        else:
            merged.append(each)
    return merged
