"""The wall around a rehearsal: what keeps the user's files as they are, whatever the script does. Standard library alone."""
