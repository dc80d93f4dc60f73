"""The machine: GPUs, host memory, control groups, and which trial gets which device."""
