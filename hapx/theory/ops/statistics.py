"""Reductions beside sum, mean and maximum: moments, norms, counts. What is reduced is whole, unless it is a count or a sum."""

from __future__ import annotations

from collections.abc import Iterable

from hapx.theory.ops.creation import nothing
from hapx.theory.ops.reductions import reduced_whole, reduction_rules
from hapx.theory.registry import Context, OpEntry, Rule, register

DIMS = """aten.aminmax aten.var_mean.correction aten.var_mean.dim aten.std_mean.correction aten.std_mean.dim aten.any.dims aten.all.dims aten.nanmean
    aten.frobenius_norm.dim aten.linalg_norm aten.linalg_matrix_norm aten.norm.ScalarOpt_dim_dtype"""
EVERYTHING = """aten.prod.default aten.var.default aten.std.default aten.var_mean.default aten.std_mean.default aten.median.default
    aten.nanmedian.default aten.max.default aten.min.default aten.any.default aten.all.default aten.norm.Scalar aten.norm.ScalarOpt_dtype aten.dist"""


def counted(context: Context) -> Iterable[Rule]:
    """Kept dims pass; a split reduced dim leaves Partial."""
    return reduction_rules(context, "", False)


register(OpEntry(tuple(DIMS.split()), reduced_whole))
register(OpEntry(tuple(EVERYTHING.split()), nothing, reason="no sum: all elements are needed in one place"))
register(OpEntry(("aten.count_nonzero", "aten.nansum"), counted, sum="reduced dims"))
