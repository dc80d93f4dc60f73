"""The sandbox of a rehearsal: the script cannot change the user's files. Standard library alone."""
