"""Measurements that owners shared with ``rocm-ext bench --share``, one JSON file each; CONTRIBUTING.md says how."""
