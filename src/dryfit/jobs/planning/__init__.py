"""The PLAN job in parts: facts of trials, traces, the ladder's answers, the number of ranks."""
