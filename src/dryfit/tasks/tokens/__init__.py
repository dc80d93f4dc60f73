"""Rows as token ids. What a task of one's own needs of them."""

from dryfit.tasks.tokens.token_set import TokenSet

__all__ = ["TokenSet"]
