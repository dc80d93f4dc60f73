"""Child processes: how they are made, heard, limited and buried, and what their ends mean."""
