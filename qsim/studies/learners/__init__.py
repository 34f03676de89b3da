"""What studies train: image nets and language models, their data, and their training."""
