"""Coverage: which products of a model's program were rounded, and why others were not."""
