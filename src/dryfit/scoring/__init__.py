"""A model's answers row by row: files, metrics, intervals and analysis. Both planes use it."""
