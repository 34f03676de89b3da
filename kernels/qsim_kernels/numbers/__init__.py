"""Named records of plain numbers that describe values, codes, roundings, scales, sums, steps and counts to the kernels."""
