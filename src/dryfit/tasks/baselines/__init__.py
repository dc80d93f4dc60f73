"""Baselines without a model: one answer for all rows, chance, and linear models of words."""
