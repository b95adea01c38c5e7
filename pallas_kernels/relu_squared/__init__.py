"""Squared rectifier (So et al., 2021)."""
