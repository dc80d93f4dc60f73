"""Models over several ranks as both planes know them: plans, proofs, summaries, groups of devices."""
