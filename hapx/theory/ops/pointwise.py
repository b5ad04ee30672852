"""Pointwise operators, listed by linearity. (Those that only have another name: see `hapx.graph.normalize_names`.)"""

from __future__ import annotations

from collections.abc import Iterable

from hapx.ir import CONTINUOUS, FLOATING
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from hapx.theory.registry import Context, Rule, Site, op

# one tensor, linear: f(a + b) = f(a) + f(b)
LINEAR_UNARY = """
    aten.neg aten.clone aten.contiguous aten.positive aten.alias aten.detach aten.detach_copy aten.lift_fresh_copy aten.deg2rad aten.rad2deg
    aten._conj aten.conj aten.conj_physical aten.resolve_conj aten.resolve_neg aten.real aten.imag
"""
# one tensor, not linear
UNARY = """
    aten.relu aten.gelu aten.silu aten.sigmoid aten.tanh aten.exp aten.exp2 aten.expm1 aten.log aten.log2 aten.log10 aten.log1p aten.sqrt aten.rsqrt
    aten.reciprocal aten.abs aten.square aten.frac
    aten.sin aten.cos aten.tan aten.asin aten.acos aten.atan aten.sinh aten.cosh aten.asinh aten.acosh aten.atanh
    aten.erf aten.erfc aten.erfinv aten.lgamma aten.digamma aten.polygamma aten.mvlgamma aten.i0 aten.sinc aten.special_erfcx aten.special_entr
    aten.special_ndtr aten.special_ndtri aten.special_log_ndtr aten.special_i0e aten.special_i1 aten.special_i1e
    aten.elu aten.selu aten.celu aten.leaky_relu aten.hardtanh aten.relu6 aten.hardswish aten.hardsigmoid aten.softplus aten.mish
    aten.log_sigmoid aten.hardshrink aten.softshrink aten.threshold aten.logit aten.nan_to_num
    aten.clamp.default aten.clamp_min.default aten.clamp_max.default
    aten.logical_not aten.bitwise_not aten.isnan aten.isinf aten.isfinite aten.isposinf aten.isneginf aten.signbit aten.angle
"""
# one tensor and a number, not linear
SCALAR = """
    aten.add.Scalar aten.sub.Scalar aten.rsub.Scalar aten.pow.Tensor_Scalar aten.float_power.Tensor_Scalar aten.remainder.Scalar aten.fmod.Scalar
    aten.eq.Scalar aten.ne.Scalar aten.lt.Scalar aten.le.Scalar aten.gt.Scalar aten.ge.Scalar
    aten.bitwise_and.Scalar aten.bitwise_or.Scalar aten.bitwise_xor.Scalar aten.bitwise_left_shift.Tensor_Scalar
    aten.bitwise_right_shift.Tensor_Scalar aten.floor_divide.Scalar aten.copysign.Scalar
"""
# one tensor, constant between jumps: no gradient
STEPS = "aten.sign aten.sgn aten.floor aten.ceil aten.round aten.trunc"
# only shape and dtype of the tensor count
ALIKE = "aten.zeros_like aten.ones_like aten.full_like aten.fill.Scalar aten.zero"
# one tensor and a number, linear in the tensor
LINEAR_SCALAR = "aten.mul.Scalar aten.div.Scalar"
# a number to the power of, times the logarithm of... the second tensor
SCALAR_FIRST = """
    aten.xlogy.Scalar_Self aten.special_xlog1py.self_scalar aten.remainder.Scalar_Tensor aten.bitwise_left_shift.Scalar_Tensor
    aten.bitwise_right_shift.Scalar_Tensor
"""
# two tensors, broadcast, not linear in either
BINARY = """
    aten.maximum aten.minimum aten.fmax aten.fmin aten.atan2 aten.hypot aten.copysign.Tensor aten.nextafter aten.fmod.Tensor aten.remainder.Tensor
    aten.floor_divide.default aten.logaddexp aten.logaddexp2 aten.gcd aten.lcm aten.isclose aten.xlogy.Tensor aten.special_xlog1py.default
    aten.eq.Tensor aten.ne.Tensor aten.lt.Tensor aten.le.Tensor aten.gt.Tensor aten.ge.Tensor
    aten.logical_and aten.logical_or aten.logical_xor aten.bitwise_and.Tensor aten.bitwise_or.Tensor aten.bitwise_xor.Tensor
    aten.bitwise_left_shift.Tensor aten.bitwise_right_shift.Tensor
"""

SELF_OTHER = "self: *, other: * -> *"
# further ones that are declared below, or draw a mask
OTHERS = """
    aten.add aten.sub aten.rsub aten.mul aten.div aten.ldexp aten.pow aten.float_power aten.xlogy aten.special_xlog1py aten.where aten.masked_fill
    aten.lerp aten.addcmul aten.addcdiv aten.clamp aten.clamp_min aten.clamp_max aten.heaviside aten.to aten._to_copy aten.type_as aten.dropout
    aten.complex aten.polar aten.isreal
"""
# operators and overloads that compute element by element
POINTWISE = frozenset(" ".join((LINEAR_UNARY, UNARY, SCALAR, STEPS, ALIKE, LINEAR_SCALAR, SCALAR_FIRST, BINARY, OTHERS)).split())


def linear_where(context: Context, operand: str, condition: bool) -> Iterable[Rule]:
    """Linear in one operand under a condition on the constants (what is filled in is 0, say)."""
    position = context.position(operand)
    if condition and position is not None and all(r.dtype in CONTINUOUS for r in (context.operands[position], *context.node.outputs)):
        yield Rule(tuple(PARTIAL if i == position else REPLICATED for i in range(len(context.operands))), (PARTIAL,))


def filled(context: Context) -> Iterable[Rule]:
    """As the number that it is filled with, whatever the tensor is."""
    for state in (REPLICATED, INVARIANT, PARTIAL):
        yield Rule((PARTIAL, state), (state,))


def _is_real(context: Context) -> bool:
    """The direction of complex numbers has a gradient, and whether one is real depends on it."""
    return context.operands[0].dtype in FLOATING


def prelu_signature(context: Context) -> str:
    """One weight for all, or one per channel (dim 1)."""
    rank = len(context.operands[0].shape)
    if context.operands[1].shape == (1,) or rank < 2:
        return "self: *, weight: W -> *"
    dims = " ".join(["b", "c", *(f"d{i}" for i in range(2, rank))])
    return f"self: {dims}, weight: c -> {dims}"


op(LINEAR_UNARY, "self: * -> *", linear="self")
op(UNARY, "self: * -> *")
op(SCALAR, "self: * -> *")
op(STEPS, "self: * -> *", extra=lambda c: [Rule((INVARIANT,), (REPLICATED,))] if c.operands[0].requires_grad and _is_real(c) else [])
op(ALIKE, "self: * -> *", extra=lambda c: [Rule((PARTIAL,), (REPLICATED,))])
op("aten.isreal", "self: * -> *", extra=lambda c: [Rule((PARTIAL,), (REPLICATED,))] if _is_real(c) else [])
op("aten.fill.Tensor", "self: *, value: -> *", extra=filled)
op("aten.pow.Scalar aten.float_power.Scalar", "exponent: * -> *")
op("aten.pow.Tensor_Tensor aten.float_power.Tensor_Tensor", "self: *, exponent: * -> *")
op(SCALAR_FIRST, "other: * -> *")
op(LINEAR_SCALAR, "self: * -> *", linear="self")
op("aten.add.Tensor aten.sub.Tensor aten.rsub.Tensor", SELF_OTHER, linear="self other")
op("aten.mul.Tensor", SELF_OTHER, linear="self | other")
op("aten.div.Tensor aten.ldexp.Tensor", SELF_OTHER, linear="self")
op("aten.div.Tensor_mode", SELF_OTHER, extra=lambda c: linear_where(c, "self", c.call["rounding_mode"] is None))
op("aten.div.Scalar_mode", "self: * -> *", extra=lambda c: linear_where(c, "self", c.call["rounding_mode"] is None))
op(BINARY, SELF_OTHER)
op("aten.heaviside", "self: *, values: * -> *")
# x log c is linear, but for c = 0: there it is 0 at x = 0 only
op("aten.xlogy.Scalar_Other", "self: * -> *", extra=lambda c: linear_where(c, "self", c.call["other"] > 0))
op("aten.special_xlog1py.other_scalar", "self: * -> *", extra=lambda c: linear_where(c, "self", c.call["other"] > -1))
op("aten.isin.Tensor_Tensor aten.isin.Tensor_Scalar", "elements: * -> *")
op("aten.prelu", prelu_signature)
op("aten.clamp.Tensor", "self: *, min: *, max: * -> *")
op("aten.clamp_min.Tensor", "self: *, min: * -> *")
op("aten.clamp_max.Tensor", "self: *, max: * -> *")
op("aten.where.self", "condition: *, self: *, other: * -> *", linear="self other")
op("aten.where.ScalarSelf", "condition: *, other: * -> *", extra=lambda c: linear_where(c, "other", c.call["self"] == 0))
op("aten.where.ScalarOther", "condition: *, self: * -> *", extra=lambda c: linear_where(c, "self", c.call["other"] == 0))
op("aten.where.Scalar", "condition: * -> *")
op("aten.masked_fill.Scalar", "self: *, mask: * -> *", extra=lambda c: linear_where(c, "self", c.call["value"] == 0))
op("aten.masked_fill.Tensor", "self: *, mask: *, value: -> *", linear="self value")
op("aten.complex", "real: *, imag: * -> *", linear="real imag")
op("aten.polar", "abs: *, angle: * -> *")  # linear in abs, but its gradient is not that of numbers below 0
op("aten.lerp.Scalar", "self: *, end: * -> *", linear="self end")
op("aten.lerp.Tensor", "self: *, end: *, weight: * -> *", linear="self end")
op("aten.addcmul", "self: *, tensor1: *, tensor2: * -> *", linear="self tensor1 | self tensor2")
op("aten.addcdiv", "self: *, tensor1: *, tensor2: * -> *", linear="self tensor1")


# a cast between floating types is linear; to or from an integer it is not, and integers are never Partial
op("aten.to.dtype aten.to.dtype_layout aten._to_copy", "self: * -> *", linear="self")


def glu_signature(context: Context) -> str:
    """Both halves of the split dim are needed together: it is cut in each half alike (below) or whole."""
    rank = len(context.operands[0].shape)
    dim = context.call["dim"] % rank
    tokens = " ".join(f"D{i}" if i == dim else f"d{i}" for i in range(rank))
    return f"self: {tokens} -> {tokens}"


def glu_rules(context: Context) -> Iterable[Rule]:
    """The halved dim, cut in both halves alike."""
    source, out = context.operands[0], context.node.outputs[0]
    dim = context.call["dim"] % len(source.shape)
    for outer in sorted({1} | set(context.outers([(out, dim)])) | {s // 2 for s in context.outers([(source, dim)]) if s % 2 == 0}):
        if out.shape[dim] % outer == 0 and out.shape[dim] > outer:
            yield Rule((Site(dim, 2 * outer),), (Site(dim, outer),), divides=True)


op("aten.glu", glu_signature, extra=glu_rules)
