"""Engines that start agents on other machines, and own their processes; they decide nothing."""
