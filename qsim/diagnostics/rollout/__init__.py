"""A model as a serving engine would compute it, and the gap of its probabilities."""
