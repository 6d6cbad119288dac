"""What keeps a run going without anybody: its processes, the hours in which it may run, and a server beside it."""
