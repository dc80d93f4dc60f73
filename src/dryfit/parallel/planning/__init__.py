"""From a traced model and a number of ranks to a plan of what is sharded how."""
