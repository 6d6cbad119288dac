"""Side by side with what users would pick instead: ``python -m tests.benchmarks``.

One run prints one table. What is compared, and when it may be believed:

- Each side is a process of its own, in an environment of its own (:mod:`.peers`), with the same weights, the same token
  ids in each step, the same optimiser and rate, on the same machine (:mod:`.work`).
- Nothing is timed before losses or greedy tokens agree, and nothing is reported unless timed samples have the model's
  probabilities (:mod:`.sft`, :mod:`.sampling`).
- The sides take turns, A B C C B A, in six rounds. What counts is the ratio of times within a round: its median
  and range (:mod:`.protocol`). Set-up, warm-up and compilation are reported apart.
- Only real tokens count, no padding and nothing after an answer's end.
- Beside the ratio stands what the saved work alone explains: arithmetic of padding and of logits that nothing is
  trained on, rows that wait for the longest answer.

``monitor`` is apart: ``python -m tests.benchmarks.monitor`` measures what the recorder costs.
"""
