"""One study: what comes next, doing it, its plans, its devices, and the doctor."""
