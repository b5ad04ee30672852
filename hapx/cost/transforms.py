"""What Fourier transforms keep for backward: those of real numbers what they read; if that was padded first, or is frames in a window, the copy.

In: a node of a graph. Out: operands by name, and bytes beside them. Invariant: it is what autograd keeps.
"""

from __future__ import annotations

from math import prod

from hapx.ir import COMPLEX, DTYPE_BYTES, Graph, Node
from hapx.theory.ops.complex_numbers import TRANSFORMS, transformed

FRAMED = "aten.stft"
_OF_REAL = frozenset({"aten.fft_fft", "aten.fft_ifft"} | {name for name in TRANSFORMS if name.startswith(("aten.fft_rfft", "aten.fft_ihfft"))})
SPECTRAL = frozenset({*TRANSFORMS, FRAMED})


def kept_operands(graph: Graph, node: Node) -> tuple[str, ...]:
    """Names of the operands of a transform that backward needs."""
    source, *window = (graph.refs[name] for name in node.call.refs())
    if node.call.op == FRAMED:
        reads = not window or window[0].requires_grad
        own = node.call["pad_mode"] in ("reflect", "replicate") if node.call.get("center") else reads and source.dtype not in COMPLEX
        return (*([source.name] if own else []), *(w.name for w in window))
    real = node.call.op in _OF_REAL and source.dtype not in COMPLEX
    return (source.name,) if real and not _padded(graph, node) else ()


def kept_copies(graph: Graph, node: Node) -> tuple[tuple[str, float], ...]:
    """Bytes of the copies that a transform keeps, with the tensor whose placement they have."""
    (source, *window), out = (graph.refs[name] for name in node.call.refs()), node.outputs[0]
    if source.dtype in COMPLEX:
        return ()
    each = DTYPE_BYTES[source.dtype]
    if node.call.op == FRAMED:
        width, copies = node.call["n_fft"], []
        if window:
            copies.append((out.name, float(out.size / out.shape[-2] * width * each)))
        if node.call.get("center") and (not window or window[0].requires_grad):
            copies.append((source.name, source.bytes * (1.0 + width // 2 * 2 / source.shape[-1])))
        return tuple(copies)
    size = _padded(graph, node) if node.call.op in _OF_REAL else 0
    return ((source.name, float(size * each)),) if size else ()


def _padded(graph: Graph, node: Node) -> int:
    """Elements of what is transformed, if zeros are put behind it first, else 0."""
    (name,) = node.call.refs()
    shape = graph.refs[name].shape
    sizes = node.call.get("s", node.call.get("n"))
    if sizes is None:
        return 0
    wanted = zip(transformed(node.call, len(shape)), sizes if isinstance(sizes, tuple) else (sizes,), strict=True)
    new = {**dict(enumerate(shape)), **{d: n for d, n in wanted if n != -1}}
    return prod(new.values()) if any(new[d] > n for d, n in enumerate(shape)) else 0
