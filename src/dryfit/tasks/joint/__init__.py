"""The tasks ``share`` and ``joint``: a class and a span learned at once."""
