"""Reading and comparing runs from their folders alone. Nothing here imports torch."""
