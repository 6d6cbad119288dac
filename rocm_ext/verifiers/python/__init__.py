"""Python code, judged by tests that it cannot see.

The files with a leading underscore are scripts: :class:`PythonTests` loads them into the two sandboxes, where they
import one another by these names. The underscore avoids the names of modules that the code or its tests import, such as
``units``. ``_interpreter`` serves a tool of :mod:`rocm_ext.environments`.
"""

from rocm_ext.verifiers.python.verifier import PythonTests

__all__ = ["PythonTests"]
