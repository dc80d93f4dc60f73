"""The training step on tensors without data, for planning; and measured on a real device."""
