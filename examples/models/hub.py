"""Models of the `transformers` package (the extra `hub`) at their published sizes, unchanged, on the `meta` device: nothing is downloaded.

hapx plan examples/models/hub.py:bert_base --cluster cluster_specs/v100x2_p100x6.yaml

The package is imported by the factories only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Example = tuple[nn.Module, dict[str, Tensor]]


def _made(name: str, config: str, batch: int, length: int, *, padding: bool = True, **options: Any) -> Example:
    """A model with a language modelling head and its inputs."""
    import transformers

    chosen = getattr(transformers, config)(**options)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, name)(chosen).train()
        ids = torch.zeros(batch, length, dtype=torch.int64)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if padding else {"input_ids": ids}
        return model, {**inputs, "labels": torch.zeros_like(ids)}


def bert_base(batch: int = 64, length: int = 128) -> Example:
    """BERT-Base (110 million parameters): masked words."""
    return _made("BertForMaskedLM", "BertConfig", batch, length)


def gpt2(batch: int = 16, length: int = 1024) -> Example:
    """GPT-2 small (124 million parameters)."""
    return _made("GPT2LMHeadModel", "GPT2Config", batch, length, padding=False)


def llama_8b(batch: int = 16, length: int = 2048) -> Example:
    """Llama 3 8B: 32 layers of width 4096, 32 heads that share 8 keys and values."""
    return _made(
        "LlamaForCausalLM", "LlamaConfig", batch, length, padding=False,
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip
