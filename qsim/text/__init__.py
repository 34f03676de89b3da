"""Text: aligned columns, and calls read back from their `repr`."""
