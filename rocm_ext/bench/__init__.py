"""Measures this machine: ``rocm-ext bench``.

Probes run in child processes (:mod:`rocm_ext.bench.child`), so that one that crashes or hangs is a row of the table and
not the end. :mod:`rocm_ext.bench.runner` starts them and collects their rows, :mod:`rocm_ext.bench.summary` says
which settings won and what the machine reaches.
"""
