"""Products whose sums are rounded as they grow."""
