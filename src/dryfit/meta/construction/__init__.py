"""Models built without memory, and how a missing weight gets the value of its own initialiser."""
