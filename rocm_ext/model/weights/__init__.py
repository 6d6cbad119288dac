"""Base weights as files: safetensors and GGUF, their quantised formats, and the layouts of llama.cpp."""
