"""Matrix products of groups of rows, in float32 sums."""
