"""What runs inside a side's process. Peers' environments have no ``rocm_ext``: only ``*_ours`` may import it."""
