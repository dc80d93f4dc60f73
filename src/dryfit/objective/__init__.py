"""A function of the user's own as a trial: found, called and heard in the trial's process. Imports no torch."""
