"""One command for a GPU: ``python -m tools.gpu``, or ``make gpu``.

It runs what the other tests cannot: checks that need a GPU, and the benchmark table at the shapes of 0.5B and 7B models
with random weights. It needs no network, and any one GPU that torch sees.

- :mod:`.parts` lists the parts, the most telling first.
- :mod:`.runner` runs a part in a process with a time limit. A crash, a hang or too little memory becomes a row.
- :mod:`.table` writes the results as one JSON file and one Markdown file, after each part.
- :mod:`.checks`, :mod:`.training` and :mod:`.runs` hold the checks, :mod:`.speeds` and :mod:`.sides` what is timed.

``--device cpu --tiny`` runs the same parts on small models.
"""
