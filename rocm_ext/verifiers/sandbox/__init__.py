"""Programs run under limits and shut off from the machine."""

from rocm_ext.verifiers.sandbox.limits import Limits, check_limits
from rocm_ext.verifiers.sandbox.sandbox import BOX, USER, Outcome, RunningProgram, Sandbox, interpreter

__all__ = ["BOX", "USER", "Limits", "Outcome", "RunningProgram", "Sandbox", "check_limits", "interpreter"]
