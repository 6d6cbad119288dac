"""Training in Python: one object with four calls, over the parts that the recipes use.

    from rocm_ext import training

    with training.open("cpu_pocket", output_dir="demo/python") as model:
        model.forward_backward(rows, "cross_entropy")
        model.optim_step(lr=1e-3)
        answers = model.sample(["12 + 30 = ?"], samples=8, max_new_tokens=32)
        model.save("demo/python/state")

The short form trains on rows as ``lora_finetune_rocm`` does: ``run = training.fine_tune("cpu_pocket", rows)``.

Importing this imports no torch, so that :func:`open` can set the machine's environment in time.
"""

from rocm_ext.training.opening import fine_tune
from rocm_ext.training.opening import open_model as open

__all__ = ["fine_tune", "open"]
