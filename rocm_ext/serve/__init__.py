"""Tinker's training API over one model in this process: ``rocm-ext serve``.

Clients are unchanged: the SDK ``tinker``, and recipes of ``tinker-cookbook``. A request goes through these files:

- ``server``: the port, and the two threads.
- ``app``: HTTP, the key, limits of bodies.
- ``protocol``: bodies and answers.
- ``work``: the order of requests; one thread computes them.
- ``adapters``: the models of clients, over one base model, and the model that samples.
- ``checkpoints``: their folders.
- ``samples``: sampling calls, many in one batch.
- ``losses``: the protocol's losses.
"""
