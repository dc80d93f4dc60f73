"""One study: what comes next, doing it, its plans, its doctor; and the Python functions of dryfit."""
