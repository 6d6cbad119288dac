"""The ranks of a run, on one machine or several."""
