"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import linalg, losses, pointwise, reductions, views

__all__ = ["linalg", "losses", "pointwise", "reductions", "views"]
