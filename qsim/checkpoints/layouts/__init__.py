"""Layouts: how libraries name, pack and describe the low-precision weights of a checkpoint."""
