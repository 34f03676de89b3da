"""The subjects of studies: image nets and language models, their data, and their training."""
