"""Compare this library with its alternatives: ``python -m tools.benchmarks``.

One run prints one table. The method:

- Each side runs in a process and an environment (:mod:`.peers`), with the same weights, the same token
  ids in each step, the same optimiser and rate, on the same machine (:mod:`.work`).
- Timing starts only after losses or greedy tokens agree. A sampling result counts only if the timed samples have the
  model's probabilities (:mod:`.sft`, :mod:`.sampling`).
- The sides take turns, A B C C B A, in six rounds. The result is the median and range of the ratio of times within a
  round (:mod:`.protocol`). The table reports set-up, warm-up and compilation separately.
- Only real tokens count: no padding, and nothing after an answer's end.
- Beside the ratio the table has the part that skipped work alone explains: arithmetic on padding, logits without a
  label, and rows that wait for the longest answer.
"""
