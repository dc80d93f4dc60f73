"""A training step: loss and gradients of a batch, optimizers and schedules, and what is not a number."""
