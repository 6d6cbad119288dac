"""Sample, verify, keep, train, repeat: the parts of RAFT (arXiv:2304.06767)."""
