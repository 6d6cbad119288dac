"""Plan a run before it starts: memory, work and time."""
