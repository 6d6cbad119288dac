"""What runs inside a side's process. Peers' environments have no ``rocm_ext``: only ``ours_*`` may import it."""
