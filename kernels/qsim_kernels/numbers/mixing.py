"""The constants with which every implementation of a tensor's checksum mixes an element's bits with its index."""

#: Odd numbers whose bits show no pattern: the first folds 64 bits into 32, the second spreads an index over all 32.
FOLD = 0x27D4EB2F
SPREAD = 0x9E3779B1

#: Factors, and shifts that carry a product's upper bits to its lower ones.
STIR = ((0x85EBCA6B, 15), (0xC2B2AE35, 16))
