"""The search: its space, suggestions and pruning, and what follows a study elsewhere."""
