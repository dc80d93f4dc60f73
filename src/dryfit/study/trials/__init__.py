"""The trials of one study: their configurations, what their children are asked, and how long these may take."""
