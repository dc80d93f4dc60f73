"""Child processes: started, heard, limited and ended."""
