"""Tinker's training API over one model in this process: ``rocm-ext serve``.

Clients are unchanged: the SDK ``tinker``, and recipes of ``tinker-cookbook``. A request goes through these files:

- ``app``: HTTP, the key, limits of bodies.
- ``protocol``: bodies and answers.
- ``work``: the order of requests; one thread computes them.
- ``adapters``: the models of clients, over one base model; their checkpoints and samplers.
- ``losses``: the protocol's losses.
"""
