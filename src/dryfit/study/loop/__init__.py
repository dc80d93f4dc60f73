"""The session of a study: the loop, its deciders, and the handling of messages and ended attempts."""
