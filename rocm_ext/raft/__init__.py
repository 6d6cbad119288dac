"""The parts of RAFT: sample, verify, select, train, repeat (arXiv:2304.06767)."""
