"""Several machines: an agent on each dials home, and is one node of the study (docs/nodes.md)."""
