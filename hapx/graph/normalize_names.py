"""Operators that are another one by another name: same arguments, same values.

In: an overload. Out: the one that the tables of operators and of costs know.
"""

from __future__ import annotations

from functools import cache

import torch

# "name other": aten.name is aten.other
_SAME = """
    absolute abs, negative neg, multiply mul, subtract sub, divide div, true_divide div, fix trunc, clip clamp, concat cat, concatenate cat,
    arccos acos, arcsin asin, arctan atan, arccosh acosh, arcsinh asinh, arctanh atanh, arctan2 atan2, ger outer, max maximum, min minimum,
    greater gt, greater_equal ge, less lt, less_equal le, not_equal ne, __and__ bitwise_and, __or__ bitwise_or, __xor__ bitwise_xor,
    __lshift__ bitwise_left_shift, __rshift__ bitwise_right_shift, special_expit sigmoid, special_exp2 exp2, special_expm1 expm1,
    special_log1p log1p, special_erf erf, special_erfc erfc, special_erfinv erfinv, special_sinc sinc, special_gammaln lgamma,
    special_digamma digamma, special_psi digamma, special_polygamma polygamma, special_multigammaln mvlgamma, special_logit logit,
    special_i0 i0, special_round round, special_xlogy xlogy, special_softmax softmax, special_log_softmax log_softmax,
    special_logsumexp logsumexp, swapdims transpose, moveaxis movedim, unsafe_split split, unsafe_chunk chunk,
    unsafe_split_with_sizes split_with_sizes, cholesky linalg_cholesky
"""
OTHER = dict(pair.split() for pair in _SAME.split(","))


def types(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """(name, type) of every argument."""
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def with_types(packet: torch._ops.OpOverloadPacket, op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload of `packet` with the arguments of `op`, by name and type; where there is none, by type. That of the same name first."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    found = [o for o in overloads if types(o) == types(op)] or [o for o in overloads if _only_types(o) == _only_types(op)]
    return min(found, key=lambda o: o._overloadname != op._overloadname, default=None)


def _only_types(op: torch._ops.OpOverload) -> list[str]:
    return [kind for _, kind in types(op)]


@cache
def canonical(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload that `op` is by another name, or `op` itself."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten" or name not in OTHER:
        return op
    return with_types(getattr(torch.ops.aten, OTHER[name]), op) or op
