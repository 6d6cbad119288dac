"""The model that is trained: built by torchtune, with adapters, attention and norms of our own."""
