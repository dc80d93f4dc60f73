"""A model's forward pass as data, by ``torch.export`` on the meta device."""
