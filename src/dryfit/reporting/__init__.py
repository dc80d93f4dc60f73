"""Output about a study for people and programs."""
