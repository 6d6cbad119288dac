"""``rocm-ext doctor``: is this machine fit to train?

It gathers facts once, from this machine or from a recorded copy, and judges them with pure functions. Only
:mod:`rocm_ext.machine.doctor.probe` imports torch, in a separate process.
"""

from rocm_ext.machine.doctor.judge import exit_code, judge, verdict

__all__ = ["exit_code", "judge", "verdict"]
