"""Data sets in formats of their own, as rows of dryfit's: one module a format, pure; ``writing`` does the doing."""
