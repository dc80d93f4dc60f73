"""The task ``evidence``: spans of texts, decoded, scored and averaged."""
