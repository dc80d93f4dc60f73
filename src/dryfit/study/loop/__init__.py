"""The session of a study: the loop, what it decides by, and what it does with messages and ends."""
