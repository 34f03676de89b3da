"""One step of an optimizer, for many tensors at once."""
