"""Tests with a real pretrained model; `make test-real` downloads it and runs them.

``gsm8k.jsonl`` holds short rows of GSM8K (github.com/openai/grade-school-math), whose licence is in ``gsm8k.LICENSE``.
"""
