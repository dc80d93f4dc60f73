"""Convert data sets of other formats into JSON rows: a pure module for each format, and ``writing`` for the files."""
