"""``rocm-ext bench``: measures this machine.

Probes run in child processes (:mod:`rocm_ext.bench.child`): a crash or a hang becomes a row of the table, and the other
probes still run. :mod:`rocm_ext.bench.runner` starts the children, :mod:`rocm_ext.bench.sweep` chooses what to
measure, and :mod:`rocm_ext.bench.summary` finds the fastest settings and the machine's speeds.
"""
