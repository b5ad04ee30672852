"""What calls keep and need on processors only, where oneDNN's kernels run or no fused one is there.

In: a node, and where it has its operands. Out: bytes per tensor, which `hapx.cost.local_sizes` scales by placement. Invariant: as measured on the
kernels of torch 2.13; GPUs know nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from hapx.cost.compute import tensor
from hapx.cost.contractions import STATES_KEPT
from hapx.cost.strides import ATTENTION
from hapx.cost.transients import Sizes, each
from hapx.ir import CONVOLUTIONS, Graph, Node, OpCall
from hapx.states import Placement, Sharded

WIDE = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})  # what oneDNN asks of a processor for vectors of 64 bytes


@cache
def vector_of_cpu() -> int:
    """Numbers of 4 bytes in a vector of oneDNN's kernels: 16 with AVX-512, 8 with AVX2, by the machine that plans; 16 where it does not say."""
    with suppress(OSError):
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        known = set(flags[1].split()) if flags is not None else set()
        return 8 if "avx2" in known and not known >= WIDE else 16
    return 16


def kept_on_cpu(graph: Graph, node: Node, placements: Mapping[str, Placement]) -> Sizes:
    """What the call keeps in addition where it has no fused kernel: a weighted RMS norm also keeps what it multiplies by the weight; attention whose
    values have another width than its keys, because that is cut, keeps its weights; oneDNN's LSTM keeps its workspace."""
    out = node.outputs[0]
    if _is_lstm(node):
        return ((out.name, _lstm_workspace(graph, node)),)
    if node.call.op == ATTENTION:
        query, key, value = (tensor(graph, node.call, name) for name in ("query", "key", "value"))
        assert query is not None and key is not None and value is not None
        cut = any(isinstance(s, Sharded) and s.dim == len(value.shape) - 1 for s in placements[value.name].states)
        return ((query.name, float(query.bytes) / query.shape[-1] * key.shape[-2]),) if cut else ()
    return ((out.name, float(out.bytes)),) if node.call.op == "aten.rms_norm" and node.call.get("weight") is not None else ()


def temporaries_on_cpu(graph: Graph, node: Node, backward: bool) -> Sizes:
    """What a call needs only while it runs. What a convolution with strides spreads over its input's pixels, the cotangent of the input or the result
    of a transposed one, is copied once more into a contiguous tensor. Backward of a layer of an LSTM has the cotangents of its gates in a scratchpad
    (measured: 4.4 numbers per hidden one), a contiguous cotangent, and the cotangent of what the layer before made."""
    call = node.call
    if backward and _is_lstm(node):
        return ((node.outputs[0].name, node.outputs[0].bytes * (5.4 / _directions(call) + (call["num_layers"] > 1))),)
    if call.op not in CONVOLUTIONS or not max(each(call.get("stride", 1))) > 1:
        return ()
    if bool(call.get("transposed") or "transpose" in call.op) == backward:
        return ()
    source = tensor(graph, call, "input")
    assert source is not None
    spread = source if backward else node.outputs[0]
    return ((spread.name, float(spread.bytes)),) if spread.requires_grad or not backward else ()


def _is_lstm(node: Node) -> bool:
    """Whether oneDNN runs it."""
    return node.call.op == "aten.lstm" and node.outputs[0].dtype == "float32"


def _directions(call: OpCall) -> int:
    return 2 if call["bidirectional"] else 1


def _lstm_workspace(graph: Graph, node: Node) -> float:
    """Bytes that oneDNN keeps of all layers and directions beyond gates and states: 9 + 6 m + (6 m + 4) / steps per number of the result in all,
    where m is the width of a layer's input relative to its own, at least 1 (measured on torch 2.13, 15 to 60 steps, 32 to 512 wide: within 2 %), and
    what goes from layer to layer."""
    call, out = node.call, node.outputs[0]
    source = tensor(graph, call, "input")
    assert source is not None
    directions = _directions(call)
    steps = max(1, out.shape[1 if call.get("batch_first") else 0])
    inputs = [max(1.0, directions * source.shape[-1] / out.shape[-1]), *[float(directions)] * (call["num_layers"] - 1)]
    return float(out.bytes * sum(10 - STATES_KEPT["aten.lstm"] + 6 * m + (6 * m + 4) / steps for m in inputs))
