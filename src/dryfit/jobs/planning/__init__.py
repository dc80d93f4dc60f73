"""The PLAN job in parts: facts of trials, and the planner that traces their steps and finds how each fits."""
