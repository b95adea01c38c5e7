"""Text generation: prompts, then token after token, drawn or the likeliest."""
