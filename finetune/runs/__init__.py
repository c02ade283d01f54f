"""Everything that a run leaves on disk: written, read, listed and compared in one place."""
