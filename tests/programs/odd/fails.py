"""It fails by itself after a step."""

from one_layer import step

step()
raise ValueError("no such label: 7")
