"""Model cards and example programs of saved models."""
