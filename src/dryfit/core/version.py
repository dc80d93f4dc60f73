"""The version of the package and its folder, where both planes can read them."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE_FOLDER = Path(__file__).parents[1]
"""Where the sources of ``dryfit`` are: what is kept on disk is keyed by a hash of them."""
