"""Whether the best trials really differ: what ``dryfit compare`` finds out, keeps and says."""
