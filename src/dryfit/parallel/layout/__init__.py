"""What training asks of several ranks: one interface, and its forms for one process, tensor parallelism and FSDP."""
