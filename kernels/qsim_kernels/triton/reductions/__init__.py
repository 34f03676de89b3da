"""Kernels that read a tensor once and sum: tallies, row sums, checksums."""
