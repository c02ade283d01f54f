"""Learning from rewards: prompts, generated answers, reward functions, and the losses of GRPO."""
