"""What the vocabulary of the arithmetic means on each machine. `binding` gives the arithmetic's functions such a meaning."""
