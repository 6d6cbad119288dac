"""The recipes, importable as ``rocm_ext.recipes`` once installed."""
