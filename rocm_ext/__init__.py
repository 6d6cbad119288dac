"""LoRA and RAFT fine-tuning on AMD hardware, as torchtune recipes.

Nothing is imported here: torch loads :mod:`rocm_ext.hook` through this package in every
program that imports torch, and that must cost nothing.
"""

__version__ = "0.1.0"
