"""From files to batches: find the rows, understand them, render and encode them once, deal them out."""
