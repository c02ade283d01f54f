"""Write, read, list and compare everything that a run leaves on disk."""
