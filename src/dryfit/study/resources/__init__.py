"""Resources of trials: devices, cores, disk, and retention of their files."""
