"""Followers of the ledger, each in a process of its own: the Optuna storage, and trackers."""
