"""Python code, judged by tests that it cannot see.

``verifier`` extracts the code and gives the verdict; ``start`` starts the sandboxes. The files with a leading
underscore are scripts for the sandboxes, where they import one another by these names. The underscore avoids the names
of modules that the code or its tests import, such as ``units``.

- ``_source`` reads the tests: what the answer defines, and mistakes for which a row is refused.
- ``_rewrite`` has checks count where they run; ``_vacuous`` has comparisons of nothing fail.
- ``_judge_server`` forks a process for each verdict; ``_run_tests`` runs the tests there.
- ``_judge`` is the tests' side of the boundary to the code, ``_program`` the code's; ``_messages`` carries values.
- ``_interpreter`` serves a tool of :mod:`rocm_ext.environments`.
"""

from rocm_ext.verifiers.python.verifier import PythonTests

__all__ = ["PythonTests"]
