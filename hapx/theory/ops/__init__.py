"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import einsum, indexing, linalg, losses, pointwise, recurrent, reductions, routing, views

__all__ = ["einsum", "indexing", "linalg", "losses", "pointwise", "recurrent", "reductions", "routing", "views"]
