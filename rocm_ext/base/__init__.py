"""What every room stands on: errors, files, the log, this process, imports, the hub, the recipes' table."""
