"""Studies, trials and plans as data: JSON and CSV."""
