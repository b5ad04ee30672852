"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import einsum, linalg, losses, pointwise, recurrent, reductions, routing, views

__all__ = ["einsum", "linalg", "losses", "pointwise", "recurrent", "reductions", "routing", "views"]
