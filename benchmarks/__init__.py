"""One fine-tuning job, several engines, in one run: how near each comes to the machine's limit."""
