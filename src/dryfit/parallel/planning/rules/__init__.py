"""The rules of all known operators; importing this package fills the registry."""

from dryfit.parallel.planning.rules import elements, products, reductions, shapes
from dryfit.parallel.planning.rules.base import RULES

__all__ = ["RULES", "elements", "products", "reductions", "shapes"]
