"""The Optuna storage that follows the ledger, written by a process of its own."""
