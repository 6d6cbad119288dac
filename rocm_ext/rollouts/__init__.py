"""Sampling, verification and evaluation: what RAFT and GRPO share."""
