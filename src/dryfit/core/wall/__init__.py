"""The wall around a rehearsal: whatever the script does, the user's files stay as they are. Standard library alone."""
