"""What a run writes down and shows while it trains: metrics.jsonl, run.json, the live view and trackers."""
