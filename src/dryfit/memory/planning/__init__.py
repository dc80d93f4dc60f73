"""From recorded segments to a plan: the run, its peak, what would fit."""
