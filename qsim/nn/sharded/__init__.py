"""Products and embeddings of distributed tensors."""
