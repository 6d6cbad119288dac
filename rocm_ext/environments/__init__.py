"""A model's conversation partners: environments, their tools, and calls of tools."""

import importlib
from typing import TYPE_CHECKING, Any

from rocm_ext.environments.calls import Call, call_id, calls_in
from rocm_ext.environments.tools import Fault, Tools, shortened

if TYPE_CHECKING:
    from rocm_ext.environments.base import Ask, Environment, Message
    from rocm_ext.environments.openenv import OpenEnv
    from rocm_ext.environments.processes import Environments
    from rocm_ext.environments.program import Program
    from rocm_ext.environments.python import Python
    from rocm_ext.environments.tool_environment import ToolEnvironment
    from rocm_ext.environments.trl import Trl

__all__ = [
    "Ask", "Call", "Environment", "Environments", "Fault", "Message", "OpenEnv", "Program", "Python",
    "ToolEnvironment", "Tools", "Trl", "call_id", "calls_in", "shortened",
]  # fmt: skip
_LATER = {
    "Ask": "base", "Environment": "base", "Environments": "processes", "Message": "base", "OpenEnv": "openenv",
    "Program": "program", "Python": "python", "ToolEnvironment": "tool_environment", "Trl": "trl",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LATER:  # imported on use: they need the verifiers, which Windows lacks
        return getattr(importlib.import_module(f"rocm_ext.environments.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
