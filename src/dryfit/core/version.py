"""The version of the package, where both planes can read it."""

VERSION = "0.1.0"
