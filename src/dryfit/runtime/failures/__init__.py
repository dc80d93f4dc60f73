"""Failures: evidence, classification into a kind, and recovery."""
