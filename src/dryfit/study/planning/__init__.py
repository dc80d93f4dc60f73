"""Memory plans as a study asks for them, and what follows from the answers."""
