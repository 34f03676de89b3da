"""Known answers of Philox4x32-10, as Random123 publishes them: all zeros, all ones, the digits of pi."""

from __future__ import annotations

from typing import NamedTuple


class KnownAnswer(NamedTuple):
    """Four words of a counter, two of a key, and the four words that come out."""

    counter: tuple[int, int, int, int]
    key: tuple[int, int]
    words: tuple[int, int, int, int]

    @property
    def block(self) -> int:
        """The counter's lower half as the number of a block: a signed 64-bit integer, as every number here."""
        return signed(self.counter[0] | self.counter[1] << 32)

    @property
    def stream(self) -> int:
        """The counter's upper half as the number of a stream."""
        return signed(self.counter[2] | self.counter[3] << 32)

    @property
    def seed(self) -> int:
        """The key as a seed."""
        return signed(self.key[0] | self.key[1] << 32)


def signed(word: int) -> int:
    """A 64-bit word as the signed integer of the same bits."""
    return word - (1 << 64) if word >> 63 else word


ONES = 0xFFFFFFFF

ANSWERS = (
    KnownAnswer((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    KnownAnswer((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    KnownAnswer(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    ),
)
