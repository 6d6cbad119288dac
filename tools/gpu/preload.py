"""What parts import, loaded once on a CPU, where parts are forks."""

from rocm_ext.recipes import distil_rocm, dpo_rocm, grpo_rocm, lora_finetune_rocm, raft_rocm  # noqa: F401

import tools.gpu.checks
import tools.gpu.runs
import tools.gpu.sides
import tools.gpu.speeds
import tools.gpu.training  # noqa: F401
