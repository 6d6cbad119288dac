"""Models on the Hugging Face hub."""

from pathlib import Path

# Owners of models that folders are usually named after
_OWNERS = {
    "Llama": "meta-llama",
    "Meta-Llama": "meta-llama",
    "Ministral": "mistralai",
    "Mistral": "mistralai",
    "Qwen": "Qwen",
    "SmolLM": "HuggingFaceTB",
}


def how_to_download(folder: Path) -> str:
    """Return the command that downloads a model into ``folder``, as the end of a message."""
    owner = next((owner for start, owner in _OWNERS.items() if folder.name.startswith(start)), "OWNER")
    return f"download the model: tune download {owner}/{folder.name or 'NAME'} --output-dir {folder}"
