"""Turn files into batches: find the rows, parse them, render and encode them once, and deal them to the ranks."""
