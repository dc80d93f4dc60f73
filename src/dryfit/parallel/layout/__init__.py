"""The interface between training and ranks, for one process, tensor parallelism and FSDP."""
