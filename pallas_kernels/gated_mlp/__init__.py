"""The gated feed-forward: two of its products, and what lies between them and the others."""
