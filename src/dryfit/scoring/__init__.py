"""A model's answers row by row: in files, their metrics, intervals, and what is wrong with them. Both planes use it."""
