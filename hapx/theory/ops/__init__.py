"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import convolution, linalg, losses, pointwise, reductions, views

__all__ = ["convolution", "linalg", "losses", "pointwise", "reductions", "views"]
