"""The search space: which keys may be searched, over which values, under which conditions."""
