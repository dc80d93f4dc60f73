"""What a training step takes of a device, without taking it."""
