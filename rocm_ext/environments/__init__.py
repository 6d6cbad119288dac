"""What a model talks with: tools, and how it calls them."""

from rocm_ext.environments.calls import Call, call_id, calls_in
from rocm_ext.environments.tools import Tools, shortened

__all__ = ["Call", "Tools", "call_id", "calls_in", "shortened"]
