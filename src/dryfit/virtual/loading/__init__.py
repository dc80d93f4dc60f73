"""Models without weights, however a script makes or loads them."""
