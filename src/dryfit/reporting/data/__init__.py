"""Studies, trials and plans as data: JSON, CSV, records."""
