"""Meanings of the arithmetic's vocabulary on each machine. `binding` gives them to its functions."""
