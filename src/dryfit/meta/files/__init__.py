"""Checkpoint files: headers, shards, tensors and parts of tensors."""
