"""Processes that verify, so that a verifier cannot stop or crash the run."""

from rocm_ext.verifiers.workers.pool import Pool

__all__ = ["Pool"]
