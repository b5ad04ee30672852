"""Small models of the `transformers` package, unchanged, with random weights in float64 and without dropout.

In: a name of `MODELS`. Out: how to make the model and its inputs (keyword arguments, labels included). Nothing is downloaded: every model
is made from a configuration. The package is imported where it is used, so that collecting these tests does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH, LENGTH, VOCABULARY, CLASSES = 10, 6, 24, 4
Inputs = dict[str, Tensor]
_LOCK = Lock()


@dataclass(frozen=True)
class HubModel:
    """`make`: the model. `example`: inputs from a generator."""

    make: Callable[[], nn.Module]
    example: Callable[[torch.Generator], Inputs]

    def build(self) -> nn.Module:
        with _LOCK:  # ranks are threads, and there is one default generator
            torch.manual_seed(0)
            model = self.make().to(torch.float64).train()
            with torch.no_grad():  # zeros and ones of a fresh model hide mistakes
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.05)
        return model

    def inputs(self, step: int) -> Inputs:
        return self.example(torch.Generator().manual_seed(step))


class Doubled(TorchFunctionMode):
    """float32 means float64. These models compute norms, rotations and losses in float32 whatever their dtype is, where the order of a sum shows
    in the eighth digit; in this mode, both when a model runs and when it is captured, nothing but the mathematics can differ."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = [torch.float64 if a is torch.float32 else a for a in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


# ---- models ----------------------------------------------------------------------------------------------------------------


def _transformer(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return made


BERT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES,
}  # fmt: skip
GPT2: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 12,
}  # fmt: skip
VIT: Mapping[str, Any] = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES,
}  # fmt: skip
RESNET: Mapping[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": CLASSES}
T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
WAV2VEC2: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24, "conv_dim": (16, 16),
    "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "ctc_zero_infinity": True,
}  # fmt: skip
MIXTRAL: Mapping[str, Any] = {
    **LLAMA,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "experts_implementation": "batched_mm",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# ---- inputs ------------------------------------------------------------------------------------------------------------------


def _ids(generator: torch.Generator, limit: int, *shape: int) -> Tensor:
    return torch.randint(1, limit, shape, generator=generator)


def _padding(generator: torch.Generator) -> Tensor:
    """1 for the first few tokens of each sample, 0 for what is padded."""
    lengths = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=generator)
    return (torch.arange(LENGTH) < lengths).long()


def masked_words(generator: torch.Generator) -> Inputs:
    """Some tokens are to be guessed; the others have label -100."""
    ids = _ids(generator, VOCABULARY, BATCH, LENGTH)
    hidden = torch.rand(BATCH, LENGTH, generator=generator) < 0.4
    hidden[0, 0] = True
    return {"input_ids": ids, "attention_mask": _padding(generator), "labels": ids.masked_fill(~hidden, -100)}


def sentences(generator: torch.Generator) -> Inputs:
    ids = _ids(generator, VOCABULARY, BATCH, LENGTH)
    return {"input_ids": ids, "attention_mask": _padding(generator), "labels": _ids(generator, CLASSES, BATCH)}


def next_words(generator: torch.Generator) -> Inputs:
    ids, mask = _ids(generator, VOCABULARY, BATCH, LENGTH), _padding(generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded(generator: torch.Generator) -> Inputs:
    ids = _ids(generator, VOCABULARY, BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def translations(generator: torch.Generator) -> Inputs:
    ids = _ids(generator, VOCABULARY, BATCH, LENGTH)
    return {"input_ids": ids, "attention_mask": _padding(generator), "labels": _ids(generator, VOCABULARY, BATCH, 5)}


def speech(generator: torch.Generator) -> Inputs:
    """Labels of a few characters, padded with -100."""
    labels, lengths = _ids(generator, VOCABULARY, BATCH, 4), torch.randint(1, 5, (BATCH, 1), generator=generator)
    waves = torch.randn(BATCH, 160, generator=generator, dtype=torch.float64)
    return {"input_values": waves, "labels": labels.masked_fill(torch.arange(4) >= lengths, -100)}


def images(size: int, generator: torch.Generator) -> Inputs:
    pixels = torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": _ids(generator, CLASSES, BATCH)}


EAGER = {"attn_implementation": "eager"}  # products and a softmax instead of the fused kernel


def _hub(name: str, config: str, example: Callable[[torch.Generator], Inputs], **options: Any) -> HubModel:
    return HubModel(partial(_transformer, name, config, **options), example)


MODELS: Mapping[str, HubModel] = {
    "bert, masked words": _hub("BertForMaskedLM", "BertConfig", masked_words, **BERT),
    "bert, classes": _hub("BertForSequenceClassification", "BertConfig", sentences, **BERT, **EAGER),
    "gpt2": _hub("GPT2LMHeadModel", "GPT2Config", next_words, **GPT2),
    "gpt2, eager": _hub("GPT2LMHeadModel", "GPT2Config", unpadded, **GPT2, **EAGER),
    "llama": _hub("LlamaForCausalLM", "LlamaConfig", next_words, **LLAMA),
    "llama, eager": _hub("LlamaForCausalLM", "LlamaConfig", unpadded, **LLAMA, **EAGER),
    "vit": _hub("ViTForImageClassification", "ViTConfig", partial(images, 8), **VIT),
    "resnet": _hub("ResNetForImageClassification", "ResNetConfig", partial(images, 16), **RESNET),
    "t5": _hub("T5ForConditionalGeneration", "T5Config", translations, **T5),
    "wav2vec2": _hub("Wav2Vec2ForCTC", "Wav2Vec2Config", speech, **WAV2VEC2),
    "mixtral": _hub("MixtralForCausalLM", "MixtralConfig", next_words, **MIXTRAL),
}

# not among the models that are compared with plain PyTorch: its masks are those of this library's executor
DROPPING = _hub("BertForMaskedLM", "BertConfig", masked_words, **{**BERT, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3})
