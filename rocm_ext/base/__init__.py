"""The foundation of all rooms: errors, files, the log, this process, imports, the hub, the table of recipes."""
