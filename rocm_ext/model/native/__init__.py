"""Decoders of torchtune's modules, for Llama's and Qwen's dense models."""
