"""Every key a recipe reads, with its default."""
