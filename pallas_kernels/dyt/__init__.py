"""Dynamic tanh, a normalisation without statistics (Zhu et al., 2025)."""
