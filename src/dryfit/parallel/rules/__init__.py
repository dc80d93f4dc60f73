"""The rules of all operators that are known; importing them makes the registry."""

from dryfit.parallel.rules import elements, products, reductions, shapes
from dryfit.parallel.rules.base import RULES

__all__ = ["RULES", "elements", "products", "reductions", "shapes"]
