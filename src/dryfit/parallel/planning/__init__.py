"""Make a sharding plan from a traced model and a number of ranks."""
