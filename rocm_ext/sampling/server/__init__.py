"""Sampling on servers that speak OpenAI's protocol."""
