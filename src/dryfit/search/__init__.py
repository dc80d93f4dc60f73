"""The search: its space, suggestions and pruning, and how a changed study is compared with what it was."""
