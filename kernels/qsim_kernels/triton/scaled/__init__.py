"""Rounding under scales."""
