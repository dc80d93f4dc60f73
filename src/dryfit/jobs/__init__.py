"""The work of child processes, one module a job: each takes a request and returns a result."""
