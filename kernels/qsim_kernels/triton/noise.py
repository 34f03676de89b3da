"""Random bits inside a kernel: Philox4x32-10 on the logical index, one call for four or eight elements."""

import triton
import triton.language as tl


@triton.jit
def multiply(a, b: tl.constexpr):
    """Both halves of a 64-bit product: one multiplication, where Triton's own Philox takes two."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def words(index, seed, stream):
    """The four words of the blocks with these numbers; see `reference.philox.philox`."""
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2, c3 = stream.to(tl.uint32), (stream >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = multiply(c0, 0xD2511F53)
        high1, low1 = multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def interleave4(a, b, c, d):
    """a0 b0 c0 d0 a1 b1 …"""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def noise(
    first, seed, stream, keep, correction,
    HALVES: tl.constexpr, WHOLE: tl.constexpr, EIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The random integers of `BLOCK` elements from logical index `first` on, in the top bits of 16 or 32.

    Args:
        first: Logical index of the block's first element.
        seed: 64 bits.
        stream: 64 bits.
        keep: Mask of the random bits that the rounding uses.
        correction: What stands behind the last of them.
        HALVES: Half a word for each element, 16 bits; otherwise a whole one, 32 bits.
        WHOLE: Whether all of those bits are used, with nothing behind them.
        EIGHT: Whether a thread holds eight neighbours, as it does where 16-bit numbers are loaded or stored; otherwise four. The words go
            to the registers of the elements they belong to, or shared memory would have to carry them there.
        ALIGNED: Whether `first` begins a Philox block.
        BLOCK: How many elements.
    """
    if ALIGNED and HALVES:
        a, b, c, d = words(first // 8 + tl.arange(0, BLOCK // 8), seed, stream)
        even = interleave4(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF, d & 0xFFFF)
        drawn = tl.interleave(even, interleave4(a >> 16, b >> 16, c >> 16, d >> 16))
    elif ALIGNED and EIGHT:
        pair = first // 4 + 2 * tl.arange(0, BLOCK // 8)
        a, b, c, d = words(pair, seed, stream)
        e, f, g, h = words(pair + 1, seed, stream)
        drawn = tl.interleave(interleave4(a, c, e, g), interleave4(b, d, f, h))
    elif ALIGNED:
        a, b, c, d = words(first // 4 + tl.arange(0, BLOCK // 4), seed, stream)
        drawn = interleave4(a, b, c, d)
    else:
        index = first + tl.arange(0, BLOCK)
        place = (index % 8 // 2 if HALVES else index % 4).to(tl.int32)
        a, b, c, d = words(index // 8 if HALVES else index // 4, seed, stream)
        drawn = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
        if HALVES:
            drawn = tl.where(index % 2 == 0, drawn & 0xFFFF, drawn >> 16)
    if not WHOLE:
        drawn = (drawn & keep.to(tl.uint32)) | correction.to(tl.uint32)
    return drawn
