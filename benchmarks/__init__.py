"""Measurements: one module per question; results/ holds the dated tables."""
