"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import advanced_indexing, indexing, linalg, losses, pointwise, reductions, views

__all__ = ["advanced_indexing", "indexing", "linalg", "losses", "pointwise", "reductions", "views"]
