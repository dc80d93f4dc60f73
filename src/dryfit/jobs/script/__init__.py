"""A user's own training script as a trial: run as it is, its Trainer or its reports connected with the study."""
