"""Python code, judged by tests that it cannot see.

The files with a leading underscore are scripts: :class:`PythonTests` copies them side by side into the two sandboxes,
where they import each other by these names. The underscore keeps them apart from modules that the code or its tests
import, such as a ``units``. ``_interpreter`` serves a tool of :mod:`rocm_ext.environments`.
"""

from rocm_ext.verifiers.python.verifier import PythonTests

__all__ = ["PythonTests"]
