"""The gated feed-forward: the product that makes up, the product that makes its gradient, and the gate."""
