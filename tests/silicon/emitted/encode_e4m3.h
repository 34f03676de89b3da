/*
 * Written by qsim: the arithmetic of https://pypi.org/project/qsim-torch, to the bit.
 * SPDX-License-Identifier: BSD-3-Clause
 */

#ifndef ENCODE_E4M3_H
#define ENCODE_E4M3_H

#include <stdint.h>

#ifndef QSIM_FUNCTION
#if defined(__CUDACC__) || defined(__CUDA__) || defined(__HIPCC__)
#define QSIM_FUNCTION static inline __host__ __device__
#else
#define QSIM_FUNCTION static inline
#endif
#endif

/*
 * Rounds a number of fp32 = Float(8, 23, specials='ieee') to e4m3 = Float(4, 3, specials='fn').
 * Rounding: nearest. The nearest value; of two equally near ones, the one whose code ends in 0.
 * Overflow: magnitudes beyond the largest value become it, infinities too.
 * The result is the code of the rounded number.
 * Codes have 8 bits, sign and magnitude: 4 exponent bits with bias 7, 3 mantissa bits; NaN 0x7F.
 * Command: qsim emit c --format e4m3 --operation encode --rounding nearest
 */
QSIM_FUNCTION uint32_t qsim_encode_e4m3_nearest(uint32_t x)
{
    /* Decode the number; of the last bits of its fraction, it only matters whether one is set. */
    const uint32_t sign = x >> 31;
    const uint32_t field = (x >> 23) & 255u;
    const uint32_t fraction = x & 0x7FFFFFu;
    const uint32_t leading = fraction >> 19;
    const uint32_t trailing = (fraction & 0x7FFFFu) > 0u;
    const uint32_t is_nan = (field == 255u) & ((leading > 0u) | trailing);

    /* Below the normal values, the significand moves right by one more place with each binade. */
    const uint32_t is_small = field < 121u;
    const uint32_t is_tiny = field < 117u;
    const uint32_t significand = leading | 16u;
    const uint32_t distance = (uint32_t)((120 - (int32_t)field) & 3);
    const uint32_t subnormal = is_tiny ? 0u : ((significand >> 1) >> distance);
    const uint32_t moved_out = 15u >> (distance ^ 3u);
    const uint32_t lost = is_small & ((significand & moved_out) > 0u);

    /* Magnitudes beyond the largest value have one code, and NaN has the sign of its own. */
    const uint32_t negative = is_nan ? 0u : sign;
    const uint32_t is_beyond = ((x >> 21) & 0x3FFu) > 0x21Eu;
    const uint32_t limit = is_nan ? 127u : 126u;

    /* Truncate it to the code of the neighbour toward zero and the first bits that this lacks. A normal value only gets another bias. */
    const uint32_t exponent = (uint32_t)(((int32_t)field - 120) & 15);
    const uint32_t normal = (exponent << 4) | leading;
    const uint32_t truncated = is_small ? subnormal : normal;
    const uint32_t window = is_beyond ? (limit << 1) : truncated;

    /* Round: keep the code of the neighbour below, or add one to it. */
    const uint32_t kept = window >> 1;
    const uint32_t guard = window & 1u;
    const uint32_t sticky = trailing | lost;
    const uint32_t increment = guard & (sticky | (kept & 1u));
    const uint32_t rounded = (kept + increment) & 127u;
    return (negative << 7) | rounded;
}

#endif /* ENCODE_E4M3_H */
