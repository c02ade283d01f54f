"""What `benchmarks.gpu_session` measures on a GPU, part by part."""
