"""Merge a finished run, convert it, and push it to the hub. Every result is checked before it is kept."""
