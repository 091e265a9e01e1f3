"""Figures, one call each."""
