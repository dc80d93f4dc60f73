"""Memory plans of a study: requests, and the use of the answers."""
