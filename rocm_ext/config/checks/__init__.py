"""Range checks of a recipe's keys. Components check their own arguments."""

from rocm_ext.config.checks.rollouts import check_grpo_values, check_raft_values
from rocm_ext.config.checks.training import check_max_seq_len, check_values

__all__ = ["check_grpo_values", "check_max_seq_len", "check_raft_values", "check_values"]
