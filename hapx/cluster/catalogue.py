"""Device types that need no numbers in the cluster file: peak dense FLOP/s per dtype, memory, memory bandwidth, and the source of each.

Tensor-core figures are dense (never with structured sparsity) and, for GeForce cards, with FP32 accumulation, which is what training uses.
Memory is what the device has, not what is left beside the driver. One row per device type; a cluster file may override any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from hapx.cluster.spec import DeviceType

GIB = 2**30


def _row(name: str, memory: float, bandwidth: float, source: str, efficiency: float = 0.5, **tflops: float) -> DeviceType:
    """A catalogue row: memory in GiB, bandwidth in GB/s, peaks in TFLOP/s."""
    flops = {dtype: round(t * 1e12, 0) for dtype, t in tflops.items()}
    return DeviceType(name, flops, round(memory * GIB), bandwidth * 1e9, efficiency, source=source)


_TURING = "NVIDIA Turing GPU architecture whitepaper"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_V100 = "NVIDIA Tesla V100 GPU accelerator datasheet"
_P100 = "NVIDIA Tesla P100 GPU accelerator datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU architecture whitepaper"

# fmt: off
_ROWS = (
    # NVIDIA data-centre GPUs before tensor cores; the K80 board has two GPUs, this is one of them
    _row("K80", 12, 240, "NVIDIA Tesla K80 board specification (one of two GPUs)", fp32=4.37, fp64=1.455),
    _row("P100-PCIE-12GB", 12, 549, _P100, fp32=9.3, fp16=18.7, fp64=4.7),
    _row("P100-PCIE-16GB", 16, 732, _P100, fp32=9.3, fp16=18.7, fp64=4.7),
    _row("P100-SXM2-16GB", 16, 732, _P100, fp32=10.6, fp16=21.2, fp64=5.3),
    # NVIDIA data-centre GPUs with tensor cores
    _row("V100-PCIE-16GB", 16, 900, _V100, fp32=14.0, fp16=112, fp64=7.0),
    _row("V100-PCIE-32GB", 32, 900, _V100, fp32=14.0, fp16=112, fp64=7.0),
    _row("V100-SXM2-16GB", 16, 900, _V100, fp32=15.7, fp16=125, fp64=7.8),
    _row("V100-SXM2-32GB", 32, 900, _V100, fp32=15.7, fp16=125, fp64=7.8),
    _row("T4", 16, 320, "NVIDIA T4 Tensor Core GPU datasheet", fp32=8.1, fp16=65),
    _row("A10", 24, 600, "NVIDIA A10 Tensor Core GPU datasheet", fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    _row("A30", 24, 933, "NVIDIA A30 Tensor Core GPU datasheet", fp32=10.3, tf32=82, bf16=165, fp16=165, fp64=5.2),
    _row("A40", 48, 696, "NVIDIA A40 datasheet", fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7),
    _row("A100-PCIE-40GB", 40, 1555, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312, fp64=9.7),
    _row("A100-PCIE-80GB", 80, 1935, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312, fp64=9.7),
    _row("A100-SXM4-40GB", 40, 1555, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312, fp64=9.7),
    _row("A100-SXM4-80GB", 80, 2039, _A100, fp32=19.5, tf32=156, bf16=312, fp16=312, fp64=9.7),
    _row("L4", 24, 300, "NVIDIA L4 Tensor Core GPU datasheet", fp32=30.3, tf32=60, bf16=121, fp16=121),
    _row("L40", 48, 864, "NVIDIA L40 GPU datasheet", fp32=90.5, tf32=90.5, bf16=181, fp16=181),
    _row("L40S", 48, 864, "NVIDIA L40S GPU datasheet", fp32=91.6, tf32=183, bf16=362, fp16=362),
    _row("H100-PCIE-80GB", 80, 2039, _H100, fp32=51.2, tf32=378, bf16=756, fp16=756, fp64=25.6),
    _row("H100-SXM5-80GB", 80, 3352, _H100, fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp64=33.5),
    _row("H200-SXM-141GB", 140, 4800, "NVIDIA H200 Tensor Core GPU datasheet", fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp64=33.5),
    _row("B200-SXM-180GB", 179, 7700, "NVIDIA HGX B200 datasheet (per GPU)", fp32=75, tf32=1125, bf16=2250, fp16=2250, fp64=37),
    # NVIDIA workstation and GeForce cards
    _row("A6000", 48, 768, _GA102, fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8),
    _row("RTX-2080-Ti", 11, 616, _TURING, fp32=13.4, fp16=53.8),
    _row("RTX-3060", 12, 360, f"GeForce RTX 3060 product page; tensor rates in the ratios of the {_GA102}",
         fp32=12.7, tf32=12.7, bf16=25.5, fp16=25.5),
    _row("RTX-3070", 8, 448, _GA102, fp32=20.3, tf32=20.3, bf16=40.6, fp16=40.6),
    _row("RTX-3080", 10, 760, _GA102, fp32=29.8, tf32=29.8, bf16=59.5, fp16=59.5),
    _row("RTX-3090", 24, 936, _GA102, fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    _row("RTX-4060-Ti-16GB", 16, 288, f"GeForce RTX 4060 Ti product page; tensor rates in the ratios of the {_ADA}",
         fp32=22.1, tf32=22.1, bf16=44.1, fp16=44.1),
    _row("RTX-4070", 12, 504, f"GeForce RTX 4070 product page; tensor rates in the ratios of the {_ADA}", fp32=29.1, tf32=29.1, bf16=58.3, fp16=58.3),
    _row("RTX-4070-Ti", 12, 504, f"GeForce RTX 4070 Ti product page; tensor rates in the ratios of the {_ADA}",
         fp32=40.1, tf32=40.1, bf16=80.2, fp16=80.2),
    _row("RTX-4080", 16, 716.8, _ADA, fp32=48.7, tf32=48.7, bf16=97.5, fp16=97.5),
    _row("RTX-4090", 24, 1008, _ADA, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2),
    _row("RTX-5070", 12, 672, _BLACKWELL, fp32=30.9, tf32=30.9, bf16=61.7, fp16=61.7),
    _row("RTX-5070-Ti", 16, 896, _BLACKWELL, fp32=43.9, tf32=43.9, bf16=87.9, fp16=87.9),
    _row("RTX-5080", 16, 960, _BLACKWELL, fp32=56.3, tf32=56.3, bf16=112.6, fp16=112.6),
    _row("RTX-5090", 32, 1792, _BLACKWELL, fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5),
    # AMD; an MI250X shows itself as two devices, this is one of them, with matrix-core rates
    _row("MI250X-GCD", 64, 1638, "AMD Instinct MI250X datasheet (one of two dies)", fp32=47.9, bf16=191.5, fp16=191.5, fp64=23.9),
    _row("MI300X", 192, 5300, "AMD Instinct MI300X datasheet", fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp64=81.7),
    # one core of a machine without GPUs; `hapx profile` measures the real one
    _row("CPU-core", 4, 10, "3 GHz x 2 AVX2 units x 8 lanes x 2 (a rough figure; measure it)", fp32=0.096, fp64=0.048),
)
# fmt: on

CATALOGUE: Mapping[str, DeviceType] = MappingProxyType({t.name: t for t in _ROWS})


def suggest(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str | None:
    """Asks "did you mean ...?" with the known names nearest to `name`, without regard to case, dashes and underscores; None where nothing is near."""
    plain = {_plain(k): k for k in known}
    wanted = _plain(name)
    near = [k for p, k in plain.items() if len(wanted) >= 2 and wanted in p][:3] or [plain[p] for p in get_close_matches(wanted, plain, 3, 0.6)]
    return f"did you mean {' or '.join(near)}?" if near else None


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
