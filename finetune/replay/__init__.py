"""Compute recorded steps again, compare them, and name the cause of a difference."""
