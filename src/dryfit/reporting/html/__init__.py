"""The report: one HTML page with its figures."""
