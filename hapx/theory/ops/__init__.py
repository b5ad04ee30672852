"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import indexing, linalg, losses, pointwise, reductions, views

__all__ = ["indexing", "linalg", "losses", "pointwise", "reductions", "views"]
