"""LoRA and RAFT fine-tuning on AMD hardware, as torchtune recipes.

Where a machine's needs live:

- device setup: :mod:`rocm_ext.config.startup` (environment), :mod:`rocm_ext.train.lifecycle` (``Runtime.open``), and
  :mod:`rocm_ext.machine` (devices, budget, threads)
- BF16 policy: ``dtype`` of the profiles in ``recipe_configs/hardware``, and :mod:`rocm_ext.machine.numerics`
- activation checkpointing: :mod:`rocm_ext.plan.memory`, which chooses the layers and wraps them
- single-process data loading: the lock on ``num_workers`` in the profiles of Strix Halo, which
  :mod:`rocm_ext.machine.profile` checks, and ``StepLoader`` in :mod:`rocm_ext.data.batches`

docs/architecture.md in the repository has the rest.

Nothing is imported here: torch loads :mod:`rocm_ext.hook` through this package in every
program that imports torch, and that must cost nothing.
"""

__version__ = "0.1.0"
