"""The check that a sharded model computes what the whole one does."""
