"""The task ``evidence``: spans of texts, decoded and scored."""
