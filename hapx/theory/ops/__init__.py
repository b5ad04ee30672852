"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import convolution, dropout, linalg, losses, normalization, pointwise, pooling, reductions, resampling, views

__all__ = ["convolution", "dropout", "linalg", "losses", "normalization", "pointwise", "pooling", "reductions", "resampling", "views"]
