"""Trained models as folders: written by a trial, loaded by anyone."""
