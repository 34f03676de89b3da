"""What `train_gpt.py` is made of."""
