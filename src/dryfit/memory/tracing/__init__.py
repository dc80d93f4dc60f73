"""A training step recorded on fake CUDA tensors."""
