"""What a model talks with: tools, and how it calls them."""

from rocm_ext.environments.calls import Call, calls_in
from rocm_ext.environments.tools import Tools

__all__ = ["Call", "Tools", "calls_in"]
