"""The foundation of all rooms: errors, files, log, processes, imports, kinds of values, the hub, the recipes."""
