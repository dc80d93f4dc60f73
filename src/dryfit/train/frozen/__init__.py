"""Frozen layers' outputs, computed once for each row and shared by all trials of a study."""
