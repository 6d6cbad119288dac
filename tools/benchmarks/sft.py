"""LoRA SFT: seconds of an optimiser step.

"As shipped" means batch size, loss, AdamW and flags of qwen2_5/0.5B_lora_single_device.yaml. Rank, rate, schedule and
rows are the same for all sides. In bf16 torchtune's adapters and optimiser state are bf16; ours and PEFT's are fp32.
"""

from tools.benchmarks.training import BACKED, OURS, Peer, Work
from tools.benchmarks.work import write_steps

PACKS = 4  # torchtune's packs in a step: each has about 1,700 tokens
WORK = Work(
    name="sft",
    ours=Peer(OURS, 2),
    peers={
        "torchtune as shipped": Peer("torchtune", 2),
        "torchtune batch 8": Peer("torchtune", 8),
        "torchtune compiled": Peer("torchtune", 2, {"compile": True}),
        "torchtune packed": Peer("torchtune", 1, packs=PACKS),
        "TRL + PEFT": Peer("trl", 8),
        BACKED: Peer(OURS, 2),
    },
    write_steps=write_steps,
    warm_up=2,
    config={
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "weight_decay": 0.01,
            "lr": 3e-4,
        },
        "clip_grad_norm": 1.0,
    },
    losses={
        OURS: {},
        "torchtune": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    },
    logger={OURS: "talk.StepLogger", "torchtune": "talk.StepLogger"},
    entry="rocm_ext.recipes.lora_finetune_rocm",
    dataset="TokenRows",
    tolerances={"fp32": (1e-5,), "bf16": (0.05,)},
)
