"""Gated linear units: SwiGLU and GeGLU (Shazeer, 2020)."""
