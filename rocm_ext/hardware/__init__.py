"""The machine: which it is, what it needs, how much it may use, and what it does while a run goes on."""
