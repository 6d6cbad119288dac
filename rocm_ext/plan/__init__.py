"""What a run will take, worked out before it starts: memory, work and time."""
