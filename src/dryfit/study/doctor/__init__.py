"""``dryfit doctor``: facts are gathered, children asked, and both judged by pure functions."""
