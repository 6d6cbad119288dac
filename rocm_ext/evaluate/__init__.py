"""Evaluation of a model without training: its answers to held-out prompts, and its loss on held-out rows."""
