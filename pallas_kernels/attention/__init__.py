"""Causal self-attention: a query sees an interval of the keys before it, and of those the ones with its own id."""
