"""One training run: its steps, objective, checkpoints, metrics and folder."""
