"""Traces: the operations of a training step with their tensors, recorded, stored and compared."""
