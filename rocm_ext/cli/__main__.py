"""``python -m rocm_ext.cli``."""

import sys

from rocm_ext.cli import main

sys.exit(main())
