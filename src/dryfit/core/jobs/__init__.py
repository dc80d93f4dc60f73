"""Requests and results of the jobs that child processes do."""
