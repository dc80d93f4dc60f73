"""What ``dryfit init`` writes: a commented study file and a small synthetic data set."""
