"""The parts of GRPO: advantages, choice of prompts, steps and their records."""
