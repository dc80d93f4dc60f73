"""Child processes, the machine that they run on, and what their failures mean."""
