"""Jobs in which code of the user's own runs: a function that is called for each trial, or that makes its Trainer."""
