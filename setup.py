"""What pyproject.toml cannot say: packages are found, and an editable install copies one module.

torch fails to import without ``rocm_ext_hook``, so that module must outlive the checkout.
"""

import sys

from setuptools import Distribution, find_packages, setup

MOVED = (
    "recipes",
    "recipe_configs",
    "recipe_configs.defaults",
    "recipe_configs.hardware",
)  # see pyproject.toml


class Project(Distribution):
    """setuptools' ``editable_wheel`` asks for ``has_data`` and leaves data files out where it is missing."""

    has_data = Distribution.has_data_files


# relative to the `data` folder of a wheel; `purelib` beside it is unpacked into site-packages
copied = [("../purelib", ["rocm_ext_hook.py"])]
setup(
    distclass=Project,
    packages=[
        *find_packages(include=["rocm_ext", "rocm_ext.*"]),
        *(f"rocm_ext.{name}" for name in MOVED),
    ],
    data_files=copied if "editable_wheel" in sys.argv else [],
)
