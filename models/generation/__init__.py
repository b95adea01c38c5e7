"""Text generation: prompts, then token after token, sampled or greedy."""
