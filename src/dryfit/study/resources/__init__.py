"""What trials get of the machine: devices, cores, disk, and what stays of their files."""
