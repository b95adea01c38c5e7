"""A residual's addition and the RMSNorm of the sum in one pass."""
