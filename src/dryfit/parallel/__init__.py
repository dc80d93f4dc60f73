"""Models over several ranks: planned from a trace, proved equal to the whole, filled by slices, and run."""
