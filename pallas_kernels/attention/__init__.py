"""Causal self-attention: a query sees the keys of its own segment up to its own position, within a window."""
