"""Failures: the evidence, what kind it shows, and what may follow."""
