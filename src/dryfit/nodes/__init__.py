"""Several machines: an agent on each connects to the study and is one of its nodes (docs/nodes.md)."""
