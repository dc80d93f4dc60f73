"""PyTorch's caching allocator, simulated: settings, blocks, replay, snapshots of real runs."""
