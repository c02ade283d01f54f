"""Turn files into batches: find the rows, parse them, render and encode them once, and assign them to ranks."""
