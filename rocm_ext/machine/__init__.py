"""The machine: what it is, the settings it needs, its memory budget, and its counters during a run."""
