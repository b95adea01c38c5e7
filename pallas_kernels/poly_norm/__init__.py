"""PolyNorm, a polynomial activation of normalised powers (Zhuo et al., 2024)."""
