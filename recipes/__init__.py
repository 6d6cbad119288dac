"""The recipes. An installation provides them as ``rocm_ext.recipes``."""
