"""Training: one trial from its request to its result, and every job of a child process."""
