"""Converting a model: which layers it has, which are meant, and what became of them."""
