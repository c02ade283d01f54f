"""Readers of what the floors below know: they look, measure and report, and change nothing."""
