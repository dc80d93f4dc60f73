"""Ways to make a training fit, for both planes: sharded models, groups of devices, changed arguments."""
