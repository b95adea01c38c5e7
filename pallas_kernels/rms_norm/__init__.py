"""RMSNorm (Zhang and Sennrich, 2019)."""
