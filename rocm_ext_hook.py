"""What torch calls at the end of ``import torch``: it passes the call on to :mod:`rocm_ext.hook`.

torch does not import where this module is missing, so an editable install has a copy of it (``setup.py``), which goes
on working when the checkout is moved, deleted or broken.
"""

import os
import sys


def register() -> None:
    """torch's hook. Where :mod:`rocm_ext.hook` does not import, ``tune`` gets one line and other programs none."""
    try:
        from rocm_ext.hook import register
    except Exception as error:
        if os.path.basename(str(*getattr(sys, "argv", [])[:1])) in ("tune", "tune.exe"):
            fix = "run `pip install` in its folder again, or `pip uninstall torchtune-rocm`"
            print(
                f"torchtune-rocm: its recipes are not registered: {error}; {fix}", file=sys.stderr
            )
    else:
        register()
