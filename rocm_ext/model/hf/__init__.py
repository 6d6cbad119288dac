"""transformers' modelling code under this library's trainer, for architectures without a native decoder."""
