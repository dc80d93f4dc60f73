"""dryfit: dry-fit every trial before it touches the GPU."""

__version__ = "0.1.0"
