"""Rotary position embedding (Su et al., 2021)."""
