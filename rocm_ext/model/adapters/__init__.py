"""LoRA adapters as files: PEFT's format, and merging."""
