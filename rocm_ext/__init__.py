"""LoRA and RAFT fine-tuning on AMD hardware, as torchtune recipes.

Where what a machine needs lives: device set-up in :mod:`rocm_ext.machine` (``environment``, ``budget``, ``threads``),
the dtype's choice in :mod:`rocm_ext.machine.numerics`, activation checkpointing in :mod:`rocm_ext.plan` (which layers)
and :mod:`rocm_ext.train.learner`, and rows that one process keeps as tensors, without loader workers, in
:mod:`rocm_ext.data.rows`. docs/architecture.md has the rest.

Nothing is imported here: torch loads :mod:`rocm_ext.hook` through this package in every
program that imports torch, and that must cost nothing.
"""

__version__ = "0.1.0"
