"""Ask and measure what a run made: one way to load it, prompts, conversations, figures."""
