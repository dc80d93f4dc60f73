"""The record of a study: the ledger, its events, and the state projected from them."""
