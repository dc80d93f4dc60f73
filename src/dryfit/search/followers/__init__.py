"""What follows the ledger beside a study, each in a process of its own: the Optuna storage, and trackers."""
