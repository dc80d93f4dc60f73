"""Running a sharded model: its module on a rank, collectives, and the loss over ranks."""
