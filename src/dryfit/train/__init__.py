"""One trial's training, from its model to its result."""
