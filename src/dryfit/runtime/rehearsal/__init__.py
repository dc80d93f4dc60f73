"""Rehearsals of other people's scripts: their command lines, the process, and what else would fit."""
