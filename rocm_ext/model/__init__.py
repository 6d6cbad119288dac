"""The model under training: torchtune builds it; adapters, attention and norms are this library's."""
