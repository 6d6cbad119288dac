"""LoRA DPO: seconds of an epoch on the same pairs.

The reference is the model before training. Ours scores all pairs once, before the first step; TRL can do the same.
torchtune, and TRL by default, compute the reference in each step. So a row of the table is the time of an epoch: the
step and, where the reference comes first, the scoring of the step's pairs, in the same turn. Another row has the step
alone, which is what further epochs take.

The gate's steps repeat the same pairs, so that the losses fall from log 2 to a fifth of it, and the reference matters.

torchtune's config is llama3_1/8B_lora_dpo_single_device.yaml: batch size 4, loss, AdamW. "As shipped" also checkpoints
activations, which takes time and saves memory. Rank, rate, schedule and pairs are the same for all sides.
"""

from tools.benchmarks.training import OURS, Peer, Work
from tools.benchmarks.work import write_pair_steps

BATCH, BETA = 4, 0.1
WORK = Work(
    name="dpo",
    ours=Peer(OURS, BATCH, reference_first=True),
    peers={
        "torchtune": Peer("torchtune", BATCH),
        "torchtune batch 1": Peer("torchtune", 1),
        "torchtune as shipped": Peer("torchtune", BATCH, {"enable_activation_checkpointing": True}),
        "TRL + PEFT": Peer("trl", BATCH),
        "TRL + PEFT batch 1": Peer("trl", 1),
        "TRL + PEFT, reference first": Peer("trl", BATCH, reference_first=True),
    },
    write_steps=write_pair_steps,
    warm_up=1,
    config={
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "weight_decay": 0.01,
            "lr": 1e-3,
        },
        "clip_grad_norm": None,  # torchtune's recipe does not clip
    },
    losses={
        OURS: {"_component_": "rocm_ext.losses.Preference", "beta": BETA},
        "torchtune": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": BETA},
    },
    logger={OURS: "dpo_ours.Logger", "torchtune": "train_torchtune.DPOLogger"},
    entry="tools.benchmarks.sides.dpo_ours",
    dataset="TokenPairs",
    tolerances={"fp32": (1e-5, 1e-4), "bf16": (0.05, None)},
    sequences=2,
)
