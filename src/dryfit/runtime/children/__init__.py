"""Child processes: start, messages, limits and end."""
