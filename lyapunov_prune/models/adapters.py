"""LoRA adapters added to the weights that they stand beside."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError, first_line
from lyapunov_prune.linalg import lift
from lyapunov_prune.models.classifiers import image_shape, looks_at_images
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.progress import warn

_TOKENS = 64
# How far merging may move the logits, relative to their spread. A merged weight is rounded once more, and on random
# tokens layers amplify that: SmolLM2-135M gives 0.00001 in float32, 0.01 in float16 and 0.1 in bfloat16.
_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}
_ELSEWHERE = "merge them with the tool that made them"


@in_eval_mode
@torch.no_grad()
def merge_adapters(model: Any) -> PreTrainedModel:
    """The base model with its LoRA adapters added to the weights: `W + s·BA`. `model` itself is changed.

    Takes a `peft.PeftModel`, or a transformers model with `load_adapter`. Needs the extra `lora`. Where an adapter
    changes only one of two tied embeddings, each gets weights of its own. The logits of the merged model are compared
    with those of the adapted one. Raises LyapunovPruneError when peft is missing, for adapters of weights that other
    modules share, and when the logits differ or the adapters cannot be merged for another reason.
    """
    try:
        from peft import PeftModel
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise LyapunovPruneError("merging adapters needs peft; run: pip install 'lyapunov-prune[lora]'") from None
    try:
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        inputs, tied = _inputs(base), _are_tied(base.config)
        adapted = model(**inputs).logits
        _require_plain_layers(base)
        _untie_embeddings(base, LoraLayer)
        _require_unshared(base, LoraLayer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, about what is settled here
            if isinstance(model, PeftModel):
                model = model.merge_and_unload(safe_merge=True)
        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge(safe_merge=True)
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, module.get_base_layer())
        model.__dict__.pop("peft_config", None)
        model._hf_peft_config_loaded = False
        if tied:
            _settle_tying(model)
        merged = model(**inputs).logits
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise LyapunovPruneError(f"the adapters cannot be merged ({first_line(error)}); {_ELSEWHERE}") from error
    off, limit = _deviation(merged, adapted), _LIMITS[model.dtype]
    if not off <= limit:
        raise LyapunovPruneError(
            f"merged, the logits differ from the adapted ones by {off:.2g} of their spread, {limit:g} at most: the "
            f"adapters do more than add to weights, or stand where they have no effect; {_ELSEWHERE}"
        )
    return model


def _inputs(base: PreTrainedModel) -> dict[str, Any]:
    """Tokens from all over the vocabulary; for an image classifier a random image."""
    generator = torch.Generator().manual_seed(0)
    if looks_at_images(base):
        return {"pixel_values": torch.randn(1, *image_shape(base), generator=generator).to(base.device, base.dtype)}
    config = base.config.get_text_config(decoder=True)
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    ids = torch.randint(config.vocab_size, (1, length), generator=generator)
    return {"input_ids": ids.to(base.device), "use_cache": False}


def _deviation(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """`‖z − z'‖ / ‖z' − mean z'‖` over all tokens, the mean over the vocabulary; NaN where a logit is."""
    z, wanted = lift(logits), lift(reference)
    spread = torch.linalg.vector_norm(wanted - wanted.mean(-1, keepdim=True))
    return float(torch.linalg.vector_norm(z - wanted) / spread.clamp_min(1e-300))


def _require_plain_layers(base: PreTrainedModel) -> None:
    for config in getattr(base, "peft_config", {}).values():
        if getattr(config, "layer_replication", None):
            raise LyapunovPruneError(
                "the adapters repeat layers (layer_replication) that share their weights, and no merged checkpoint "
                f"holds those; {_ELSEWHERE}"
            )


def _untie_embeddings(base: Any, adapter: Any) -> None:
    """Give the head weights of its own where it has those of the embedding and an adapter changes one of the two."""
    pair = base.get_output_embeddings(), base.get_input_embeddings()
    head, table = (module.get_base_layer() if isinstance(module, adapter) else module for module in pair)
    if any(isinstance(module, adapter) for module in pair) and _one_weight(head, table):
        head.weight = nn.Parameter(head.weight.clone(), head.weight.requires_grad)


def _one_weight(head: nn.Module | None, table: nn.Module | None) -> bool:
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(table, "weight", None)


def _require_unshared(base: Any, adapter: Any) -> None:
    """Raise LyapunovPruneError for an adapted weight that is also another module's, which merging would change."""
    owners = Counter(id(p) for module in base.modules() for p in module.parameters(recurse=False) if p.ndim > 1)
    for name, module in base.named_modules():
        if isinstance(module, adapter) and any(owners[id(p)] > 1 for p in module.get_base_layer().parameters()):
            raise LyapunovPruneError(
                f"{name} shares its weights with another module, and its adapter is not the other's; {_ELSEWHERE}"
            )


def _are_tied(config: Any) -> bool:
    return any(getattr(c, "tie_word_embeddings", False) for c in (config, config.get_text_config(decoder=True)))


def _settle_tying(merged: PreTrainedModel) -> None:
    """Let the config say that the embeddings are no longer tied, else loading would tie them again."""
    head, table = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is None or _one_weight(head, table):
        return
    for config in (merged.config, merged.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    warn("the adapters change one of two tied embeddings; the merged model holds each by itself and is larger by one")
