"""Values of the keys that choose among kernels. This module imports no torch, because configs are read before it."""

ATTENTION = ("auto", "flash", "efficient", "math", "eager")
# torch's mode max-autotune also captures CUDA graphs, which fail with checkpointed layers (pytorch#148829) and with
# gradient accumulation (pytorch#96693). Here it means max-autotune-no-cudagraphs.
COMPILE = (False, True, "max-autotune")
