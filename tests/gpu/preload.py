"""What parts import, loaded once on a CPU, where parts are forks."""

from rocm_ext.recipes import dpo_rocm, grpo_rocm, lora_finetune_rocm, raft_rocm  # noqa: F401

import tests.gpu.checks
import tests.gpu.runs
import tests.gpu.sides
import tests.gpu.speeds
import tests.gpu.training  # noqa: F401
