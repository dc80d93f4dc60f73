"""``dryfit doctor``: gathers facts, runs children, and judges both by pure functions."""
