"""Small tools for text: units, lists of names, secrets, lines of files."""
