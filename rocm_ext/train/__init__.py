"""One training run: its steps, checkpoints, metrics and output folder."""
