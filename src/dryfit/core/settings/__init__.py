"""The settings of a trial: what is learned, how it is executed, and what follows from both."""
