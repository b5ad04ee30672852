"""How people cut models by hand: one table per mesh axis, as data.

A table says what an axis of devices is for ("batch": samples are split along it; "whole": activations are whole on it, unless a table's own cuts
split them) and which parameters are cut, by name. Nothing here is found by a search; `benchmarks.baselines` writes the programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """Dim `dim` of a tensor is cut; each of its `outer` equal blocks alike (3: a fused query, key and value projection)."""

    dim: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class CutTable:
    """What one mesh axis is used for.

    Attributes:
        activations: "batch": split by samples; "whole": the same on every device, except where cut parameters split them.
        parameters: (pattern of whole names, part): the first that matches says how a parameter is cut; others are whole.
        values: (pattern found in the line that makes a value, part): activations that are cut although no parameter of their operator is.
        storage: "used": parameters are kept as they are used; "keep": whole ones are kept in shards, gathered once per iteration;
            "free": the same, gathered again in backward (ZeRO-3).
        threshold: a parameter of fewer elements is kept whole all the same.
        factors: names of weights whose gradient each device makes from everyone's sufficient factors.
    """

    activations: Literal["batch", "whole"]
    parameters: tuple[tuple[str, Part], ...] = ()
    values: tuple[tuple[str, Part], ...] = ()
    storage: Literal["used", "keep", "free"] = "used"
    threshold: int = 0
    factors: frozenset[str] = frozenset()

    def part(self, parameter: str) -> Part | None:
        return next((p for pattern, p in self.parameters if re.fullmatch(pattern, parameter)), None)

    def value(self, source: str) -> Part | None:
        """By the line that makes the value."""
        return next((p for pattern, p in self.values if re.search(pattern, source)), None)

    def with_factors(self, factors: frozenset[str]) -> CutTable:
        return replace(self, factors=factors)


BATCH = CutTable("batch")

# ZeRO stage 3 and a form of it that keeps what was gathered; small parameters stay whole, as by DeepSpeed's stage3_param_persistence_threshold
ZERO_KEEP = CutTable("batch", storage="keep", threshold=100_000)
ZERO_FREE = replace(ZERO_KEEP, storage="free")

# inner axis of an all-reduce in two levels: reduce-scatter inside a machine, all-reduce of the shards between machines, all-gather inside
INSIDE = CutTable("batch", storage="keep")

_ROWS, _COLUMNS = Part(0), Part(1)

# Megatron-LM (Shoeybi et al. 2019, section 3): heads; the first linear layer of a perceptron by columns of its product, the second by rows; the
# vocabulary. A mixture's experts are cut as a whole, each device routes the tokens of all. (Weights are stored [out, in].)
MEGATRON = CutTable(
    "whole",
    (
        (r".*\.qkv\.(weight|bias)", Part(0, outer=3)),
        (r".*\.proj\.weight", _COLUMNS),
        (r".*\.up\.(weight|bias)", _ROWS),
        (r".*\.down\.weight", _COLUMNS),
        (r".*\.experts\.(up|down)", _ROWS),
        (r"tokens\.weight|head\.bias", _ROWS),
    ),
    ((r"sent = torch.einsum", Part(0)),),
)

# Krizhevsky 2014, "One weird trick": convolutions by samples, linear layers by channels, two at a time
WEIRD_TRICK = CutTable("batch", ((r"classifier\.0\.(weight|bias)", _ROWS), (r"classifier\.3\.weight", _COLUMNS)))

# DeepSpeed-MoE (Rajbhandari et al. 2022), GShard: data parallel, and each device has its share of the experts; tokens are sent to them and back
EXPERTS = CutTable("batch", ((r".*\.experts\.(up|down)", _ROWS),))
