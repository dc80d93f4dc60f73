"""Memory plans of trials: estimates from traces, and the ladder of what would fit."""
