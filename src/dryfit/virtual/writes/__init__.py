"""What a rehearsed script would create elsewhere: redirected to a folder of its own, muted, and told with its size."""
