"""Programs that judge what a model wrote: maths, code by tests, text, and your verifiers.

No module here imports torch, so that the worker processes of :class:`Pool` start in a fraction of a second.
"""

import sys

if sys.platform == "win32":  # the imports below fail there with less to say
    from rocm_ext.base.errors import UserError

    raise UserError("verifiers limit processes in ways that Windows does not have; use WSL2")

from rocm_ext.sandbox import Limits, Outcome, Sandbox
from rocm_ext.verifiers.answers import ExactMatch, JsonSchema, Regex
from rocm_ext.verifiers.base import Result, Verdict, Verifier
from rocm_ext.verifiers.build import build
from rocm_ext.verifiers.combine import All, Weighted
from rocm_ext.verifiers.command import Command
from rocm_ext.verifiers.compiled import Compile, Run
from rocm_ext.verifiers.extract import extract_code
from rocm_ext.verifiers.maths import MajorityAnswer, MathAnswer
from rocm_ext.verifiers.python import PythonTests
from rocm_ext.verifiers.reasoning_gym import ReasoningGym
from rocm_ext.verifiers.reward_function import RewardFunction, as_reward_function
from rocm_ext.verifiers.workers import Pool

__all__ = [
    "All", "Command", "Compile", "ExactMatch", "JsonSchema", "Limits", "MajorityAnswer", "MathAnswer",
    "Outcome", "Pool", "PythonTests", "ReasoningGym", "Regex", "Result", "RewardFunction", "Run", "Sandbox",
    "Verdict", "Verifier", "Weighted", "as_reward_function", "build", "extract_code",
]  # fmt: skip
