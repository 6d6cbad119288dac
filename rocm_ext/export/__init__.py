"""Take what a run trained to other programs: merged models, GGUF files, and the Hugging Face hub."""

from rocm_ext.export.source import Source, open_source

__all__ = ["Source", "open_source"]
