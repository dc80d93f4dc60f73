"""What every part shares: the study file, settings of a trial, errors, messages, texts. No heavy import."""
