"""Rounding, encoding and decoding, element by element."""
