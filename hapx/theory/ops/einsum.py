"""Einstein summation, and the products that are one: outer, inner, tensordot, multi_dot, bilinear, kron."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hapx.states import PARTIAL, REPLICATED
from hapx.theory.ops.views import linear_rule
from hapx.theory.registry import Context, OpEntry, Rule, Site, op, register, signature_rules

# --- einsum: its equation is the signature -------------------------------------------------------------------------------


def einsum_terms(equation: str) -> tuple[tuple[str, ...], str]:
    """Subscripts of the operands and of the result, as in the equation; a result that is not written has the ellipsis and then, in order, every
    index that occurs once."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = tuple(left.split(","))
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return terms, right


def einsum_rules(context: Context) -> Iterable[Rule]:
    """Every index, but those that an operand repeats; a summed one leaves Partial."""
    terms, result = einsum_terms(str(context.call["equation"]))
    whole = {c for term in terms for c in term if c != "." and term.count(c) > 1}
    starred = max((len(r.shape) - len(t) + 3 for t, r in zip(terms, context.operands, strict=True) if "..." in t), default=0)

    def tokens(term: str) -> str:
        named = [f"{'W' if c in whole else 'i'}{ord(c)}" for c in term.replace("...", "*") if c != "*"]
        if "..." in term:
            named.insert(term.index("."), "*")
        return " ".join(named)

    summed = {f"i{ord(c)}" for term in terms for c in term if c not in whole and c not in result}
    if "..." not in result:
        summed |= {f"*{d}" for d in range(1, starred + 1)}
    operands = [f"tensors[{i}]: {tokens(term)}" for i, term in enumerate(terms)]
    linear = " | ".join(f"tensors[{i}]" for i in range(len(terms)))
    return signature_rules(f"{', '.join(operands)} -> {tokens(result)}", sum=" ".join(sorted(summed)), linear=linear)(context)


register(
    OpEntry(
        ("aten.einsum.default",),
        einsum_rules,
        signature="as its equation says; an index that an operand repeats is whole",
        sum="indices that are not in the result",
        linear="each operand",
    )
)

# --- products of vectors, matrices and tensors -----------------------------------------------------------------------------

op("aten.outer aten.ger", "self: m, vec2: n -> m n", linear="self | vec2")
# the kernel refuses empty sums, so the summed dims stay whole
op("aten.bilinear", "input1: * I, input2: * J, weight: n I J, bias: n -> * n", linear="input1 bias | input2 bias | weight bias")


def _named(letter: str, count: int) -> list[str]:
    return [f"{letter}{d}" for d in range(count)]


def inner_signature(context: Context) -> str:
    """All dims; over the last ones it sums."""
    left, right = (len(r.shape) for r in context.operands)
    if not left or not right:  # a number times a tensor
        a, b = " ".join(_named("a", left)), " ".join(_named("b", right))
        return f"self: {a}, other: {b} -> {a} {b}"
    a, b = " ".join(_named("a", left - 1)), " ".join(_named("b", right - 1))
    return f"self: {a} k, other: {b} k -> {a} {b}"


op("aten.inner", inner_signature, sum="k", linear="self | other")


def tensordot_rules(context: Context) -> Iterable[Rule]:
    """All dims; a contracted one leaves Partial."""
    left, right = (len(r.shape) for r in context.operands)
    a, b = _named("a", left), _named("b", right)
    pairs = list(zip(context.call["dims_self"], context.call["dims_other"], strict=True))
    for k, (i, j) in enumerate(pairs):
        a[i % left] = b[j % right] = f"k{k}"
    result = [n for n in (*a, *b) if not n.startswith("k")]
    text = f"self: {' '.join(a)}, other: {' '.join(b)} -> {' '.join(result)}"
    return signature_rules(text, sum=" ".join(_named("k", len(pairs))), linear="self | other")(context)


register(OpEntry(("aten.tensordot",), tensordot_rules, sum="contracted dims", linear="self | other"))


def chain_rules(context: Context) -> Iterable[Rule]:
    """Every dim of every matrix; an inner one leaves Partial."""
    name = "matrices" if "matrices" in dict(context.call.args) else "tensors"
    last = len(context.operands) - 1
    tokens = [[f"c{i}", f"c{i + 1}"] for i in range(last + 1)]
    if len(context.operands[0].shape) == 1:
        tokens[0] = ["c1"]
    if len(context.operands[last].shape) == 1:
        tokens[last] = [f"c{last}"]
    result = ([] if len(tokens[0]) == 1 else ["c0"]) + ([] if len(tokens[last]) == 1 else [f"c{last + 1}"])
    operands = ", ".join(f"{name}[{i}]: {' '.join(t)}" for i, t in enumerate(tokens))
    inner = " ".join(f"c{i}" for i in range(1, last + 1))
    return signature_rules(f"{operands} -> {' '.join(result)}", sum=inner, linear=" | ".join(f"{name}[{i}]" for i in range(last + 1)))(context)


register(OpEntry(("aten.linalg_multi_dot", "aten.chain_matmul"), chain_rules, sum="inner dims", linear="each operand"))

# --- kron -------------------------------------------------------------------------------------------------------------------


def kron_rules(context: Context) -> Iterable[Rule]:
    """Dim d of the result is one block of `other`'s dim d per element of `self`'s; dims are aligned from the right."""
    first, second, out = *context.operands, context.node.outputs[0]
    rank = len(out.shape)
    for d in range(rank):
        a, b = d - rank + len(first.shape), d - rank + len(second.shape)
        blocks = first.shape[a] if a >= 0 else 1
        known = context.outers([(out, d)])
        if a >= 0:
            for outer in _divisors(blocks, {*known, *context.outers([(first, a)])}):
                yield Rule((Site(a, outer), REPLICATED), (Site(d, outer),), divides=True)
        if b >= 0:
            for outer in _divisors(second.shape[b], {*(o // blocks for o in known if o % blocks == 0), *context.outers([(second, b)])}):
                yield Rule((REPLICATED, Site(b, outer)), (Site(d, blocks * outer),), divides=True)
    if linear_rule(context):
        yield Rule((PARTIAL, REPLICATED), (PARTIAL,))
        yield Rule((REPLICATED, PARTIAL), (PARTIAL,))


def _divisors(size: int, outers: Iterable[int]) -> Sequence[int]:
    """Of the numbers, those that divide `size` into blocks of more than one element."""
    return sorted(o for o in outers if size > o and size % o == 0)


register(OpEntry(("aten.kron",), kron_rules, signature="dims of either operand", linear="self | other"))
