"""Studies, trials and plans as text: tables, stories, the live view."""
