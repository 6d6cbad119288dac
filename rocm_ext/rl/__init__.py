"""Learning from sampled answers: prompts, rollouts, their records, selection, and the trainers."""
