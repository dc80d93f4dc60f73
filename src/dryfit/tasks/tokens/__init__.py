"""Rows as token ids. A task of your own imports ``TokenSet`` from here."""

from dryfit.tasks.tokens.token_set import TokenSet

__all__ = ["TokenSet"]
