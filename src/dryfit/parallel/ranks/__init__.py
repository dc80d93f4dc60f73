"""A sharded model at work: its module on a rank, what ranks send, the loss over them."""
