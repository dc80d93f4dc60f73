"""Child processes, the machines that they run on, what their failures mean, and the wall around a rehearsal."""
