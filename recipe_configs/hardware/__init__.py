"""One profile per machine."""
