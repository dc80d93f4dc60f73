"""The trials of one study: configurations, requests to children, and time limits."""
