"""What studies train: nets for images and language models, their data, and how they learn."""
