"""Pointwise operators, listed by linearity."""

from __future__ import annotations

from hapx.theory.registry import Context, op

# one tensor, linear: f(a + b) = f(a) + f(b)
LINEAR_UNARY = "aten.neg aten.clone aten.contiguous aten.positive aten.alias aten.detach aten.detach_copy aten.lift_fresh_copy"
# one tensor, not linear
UNARY = """
    aten.relu aten.gelu aten.silu aten.sigmoid aten.tanh aten.exp aten.exp2 aten.expm1 aten.log aten.log2 aten.log10 aten.log1p aten.sqrt aten.rsqrt
    aten.reciprocal aten.abs aten.sign aten.sin aten.cos aten.tan aten.asin aten.acos aten.atan aten.sinh aten.cosh aten.erf aten.erfc aten.square
    aten.elu aten.selu aten.celu aten.leaky_relu aten.hardtanh aten.relu6 aten.hardswish aten.hardsigmoid aten.softplus aten.softsign aten.mish
    aten.log_sigmoid aten.tanhshrink aten.hardshrink aten.softshrink aten.threshold aten.clamp.default aten.clamp_min.default aten.clamp_max.default
    aten.logical_not aten.bitwise_not aten.isnan aten.isinf aten.isfinite aten.floor aten.ceil aten.round aten.trunc aten.frac aten.nan_to_num
    aten.logit aten.pow.Tensor_Scalar aten.pow.Scalar aten.remainder.Scalar aten.fmod.Scalar aten.rsub.Scalar
    aten.eq.Scalar aten.ne.Scalar aten.lt.Scalar aten.le.Scalar aten.gt.Scalar aten.ge.Scalar
    aten.bitwise_and.Scalar aten.bitwise_or.Scalar aten.bitwise_xor.Scalar aten.floor_divide.Scalar
    aten.add.Scalar aten.sub.Scalar
    aten.zeros_like aten.ones_like aten.full_like
"""
# one tensor and a number, linear in the tensor
LINEAR_SCALAR = "aten.mul.Scalar aten.div.Scalar"
# two tensors, broadcast, not linear in either
BINARY = """
    aten.maximum aten.minimum aten.pow.Tensor_Tensor aten.atan2 aten.fmod.Tensor aten.remainder.Tensor aten.floor_divide.default
    aten.eq.Tensor aten.ne.Tensor aten.lt.Tensor aten.le.Tensor aten.gt.Tensor aten.ge.Tensor
    aten.logical_and aten.logical_or aten.logical_xor aten.bitwise_and.Tensor aten.bitwise_or.Tensor aten.bitwise_xor.Tensor
"""

SELF_OTHER = "self: *, other: * -> *"

op(LINEAR_UNARY, "self: * -> *", linear="self")
op(UNARY, "self: * -> *")
op(LINEAR_SCALAR, "self: * -> *", linear="self")
op("aten.add.Tensor aten.sub.Tensor", SELF_OTHER, linear="self other")
op("aten.mul.Tensor", SELF_OTHER, linear="self | other")
op("aten.div.Tensor", SELF_OTHER, linear="self")
op("aten.div.Tensor_mode", SELF_OTHER)
op(BINARY, SELF_OTHER)
op("aten.prelu", "self: *, weight: W -> *")
op("aten.clamp.Tensor", "self: *, min: *, max: * -> *")
op("aten.where.self", "condition: *, self: *, other: * -> *", linear="self other")
op("aten.where.ScalarSelf aten.where.ScalarOther aten.where.Scalar", "condition: *, self: *, other: * -> *")
op("aten.masked_fill.Scalar", "self: *, mask: * -> *")
op("aten.masked_fill.Tensor", "self: *, mask: *, value: -> *", linear="self value")
op("aten.lerp.Scalar", "self: *, end: * -> *", linear="self end")
op("aten.lerp.Tensor", "self: *, end: *, weight: * -> *", linear="self end")
op("aten.addcmul", "self: *, tensor1: *, tensor2: * -> *", linear="self tensor1 | self tensor2")
op("aten.addcdiv", "self: *, tensor1: *, tensor2: * -> *", linear="self tensor1")


# a cast between floating types is linear; to or from an integer it is not, and integers are never Partial
op("aten.to.dtype aten.to.dtype_layout aten.to.device aten._to_copy aten.type_as aten.to.other aten.float aten.double aten.half", "self: * -> *", linear="self")


def glu_signature(context: Context) -> str:
    """Both halves of the split dim are needed together: that dim stays whole."""
    rank = len(context.operands[0].shape)
    dim = context.call["dim"] % rank
    tokens = " ".join(f"D{i}" if i == dim else f"d{i}" for i in range(rank))
    return f"self: {tokens} -> {tokens}"


op("aten.glu", glu_signature)
