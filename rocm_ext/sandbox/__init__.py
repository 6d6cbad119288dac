"""Programs run under limits and shut off from the machine, such as code that a model wrote and nobody has read.

``Sandbox("bubblewrap")`` runs programs under bubblewrap; SECURITY.md says what that promises and what not. If you are
root, a run has a real user id from 2 000 000 000 up that no other run has at the time, so that the kernel can limit its
number of processes. Otherwise it has a user namespace, in which Linux counts processes separately since 5.14; on older
kernels we count them from outside, every 50 ms.

``Sandbox("rlimits")`` sets the limits, a temporary working folder and an empty environment, and isolates nothing: the
code can read and write all your files, use the network, and signal or outlive your processes. Use it for code that you
trust, on machines without bubblewrap. It is never a fallback.
"""

from rocm_ext.sandbox.limits import Limits, check_limits
from rocm_ext.sandbox.sandbox import BOX, USER, Outcome, RunningProgram, Sandbox, interpreter

__all__ = [
    "BOX",
    "USER",
    "Limits",
    "Outcome",
    "RunningProgram",
    "Sandbox",
    "check_limits",
    "interpreter",
]
