"""The study file: its types, how it is read and checked, and how its errors are reported."""
