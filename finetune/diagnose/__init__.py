"""Readers of what the layers below know. They look, measure and report, and change nothing."""
