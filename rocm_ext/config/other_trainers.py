"""What other trainers call our keys, for hints at keys that we do not know."""

from collections.abc import Container

# Our key: its names in transformers, PEFT, bitsandbytes, TRL, Unsloth, axolotl and LLaMA-Factory
_NAMES = {
    "batch_size": "micro_batch_size per_device_train_batch_size",
    "clip_grad_norm": "max_grad_norm",
    "dtype": "bf16 bnb_4bit_compute_dtype fp16 torch_dtype",
    "enable_activation_checkpointing": "gradient_checkpointing use_gradient_checkpointing",
    "epochs": "num_epochs num_train_epochs",
    "kl_coef": "beta",
    "log_every_n_steps": "logging_steps",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler.num_warmup_steps": "warmup_steps",
    "max_new_tokens": "max_completion_length",
    "model.alpha_pattern": "alpha_pattern",
    "model.checkpoint_dir": "base_model model_name model_name_or_path pretrained_model_name_or_path",
    "model.lora_alpha": "lora_alpha",
    "model.lora_dropout": "lora_dropout",
    "model.lora_rank": "lora_r lora_rank r",
    "model.quantize_base": "bnb_4bit_quant_type load_in_4bit load_in_8bit quantization_bit quantization_config",
    "model.rank_pattern": "rank_pattern",
    "model.target_modules": "lora_target lora_target_linear lora_target_modules target_modules",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate lr",
    "optimizer.weight_decay": "weight_decay",
    "run_val_every_n_steps": "eval_steps",
    "samples_per_prompt": "num_generations",
    "save_every_n_steps": "save_steps",
    "steps": "max_steps",
    "tokenizer.max_seq_len": "cutoff_len max_length max_seq_length sequence_len",
    "updates_per_step": "num_iterations",
    "validation_fraction": "val_set_size",
}


def our_names(key: str, known: Container[str]) -> list[str]:
    """Return our keys for a key of another trainer: those whose first part is ``known``. Empty if there are none."""
    ours = [name for name, theirs in _NAMES.items() if key in theirs.split()]
    return [name for name in ours if name.partition(".")[0] in known]
