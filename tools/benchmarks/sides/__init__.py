"""The code of the sides' processes. Peers' environments have no ``rocm_ext``, so only ``*_ours`` may import it."""
