"""The structure of a decoder (layers, text config, backbone), and the identity of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from lyapunov_prune.errors import LyapunovPruneError, first_of, reported
from lyapunov_prune.models.compact import family_of
from lyapunov_prune.models.digest import weight_digests
from lyapunov_prune.models.experts import require_choosable
from lyapunov_prune.models.families import FAMILIES, TRUSTED, Family
from lyapunov_prune.models.hooked import held
from lyapunov_prune.models.quantised import is_packed, quantisation
from lyapunov_prune.models.reader import UNPACK
from lyapunov_prune.models.settings import forward_settings
from lyapunov_prune.models.streamed import stream_of
from lyapunov_prune.results.result import ModelIdentity

# Config names of the number of decoder layers. In an encoder-decoder `num_hidden_layers` counts the encoder, and in
# LongCat two caches per layer, so the narrower names come first.
LAYER_COUNTS = ("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
_settled: WeakSet[nn.Module] = WeakSet()
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Structure:
    """The parts of a decoder-only language model that are analysed.

    `model_type` names the family; a compact model has that of the model it was cut from. `backbone` maps token ids to
    final hidden states and holds `layers`. The head is not part of it, so measuring the residual stream builds no
    tokens × vocabulary tensor.
    """

    model_type: str
    backbone: nn.Module
    layers: nn.ModuleList
    layers_path: str  # the name of `layers` inside the model, as in state-dict keys
    config: Any  # the text config, which holds the number of layers
    count: str  # the name of that setting

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def family(self) -> Family:
        """What the family needs beyond the general rules."""
        return FAMILIES.get(self.model_type, Family())

    @property
    def trusted(self) -> bool:
        """Whether the tests put every kind of removal from this family through the gate."""
        return self.model_type in TRUSTED

    @property
    def max_context(self) -> int | None:
        """Longest context that the positions allow; None if the config names none, or −1 as XLNet's."""
        whisper: int | None = getattr(self.config, "max_target_positions", None)
        most: int | None = getattr(self.config, "max_position_embeddings", whisper)
        # In RoBERTa and ESM, positions start after the padding token's id.
        if most and any(
            hasattr(m, "position_embeddings") and hasattr(m, "padding_idx") for m in self.backbone.children()
        ):
            most -= self.config.pad_token_id + 1
        return most if most and most > 0 else None

    def layer_of(self, name: str) -> int | None:
        """The layer of the model's parameter `name`; None outside the layers."""
        prefix = f"{self.layers_path}."
        return int(name[len(prefix) :].partition(".")[0]) if name.startswith(prefix) else None

    def renamed(self, name: str, kept: Sequence[int]) -> str | None:
        """The new name of the tensor or module `name` in a model of only the layers `kept`; None if it is removed."""
        layer = self.layer_of(name)
        if layer is None:
            return name
        before = f"{self.layers_path}.{layer}"
        return f"{self.layers_path}.{kept.index(layer)}{name[len(before) :]}" if layer in kept else None

    def at_most(self, length: int) -> int:
        """`length`, or the longest context if that is shorter."""
        return min(length, self.max_context or length)


def require_versions(dense: Structure, compressed: Structure, *, as_deep: bool = False) -> None:
    """Raise LyapunovPruneError unless both have one family, width and vocabulary, as versions of one model do.

    With `as_deep` they need one number of layers too.
    """
    ours, theirs = (
        {
            "family": structure.model_type,
            "width": getattr(structure.config, "hidden_size", None),
            "vocabulary": getattr(structure.config, "vocab_size", None),
            "depth": structure.num_layers if as_deep else None,
        }
        for structure in (dense, compressed)
    )
    if what := next((what for what, wanted in ours.items() if theirs[what] != wanted), None):
        raise LyapunovPruneError(
            f"the compressed model has a {what} of {theirs[what]} and the dense one of {ours[what]}; give two versions "
            "of one model"
        )


def find_structure(model: PreTrainedModel) -> Structure:
    """The structure of the decoder `model`, found by `find_layers`.

    Raises LyapunovPruneError for an encoder, an encoder-decoder, or a model without a list of layers.
    """
    kind = type(model).__name__
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    read = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.ndim == 2
    wrong = {
        f"{kind} is an encoder-decoder; give a decoder": model.config.is_encoder_decoder,
        f"{kind} is an encoder, which reads text in both directions; give a decoder": (
            is_encoder(model.config, type(model))
        ),
        f"{kind} returns its outputs without names; set model.config.return_dict = True": (
            getattr(model.config, "return_dict", True) is False
        ),
        f"{kind} has no language-model head; load it with AutoModelForCausalLM, or give a decoder": head is None,
        f"the head of this {kind} is {quantisation(model.config)} too, and computing losses needs its values; give a "
        "checkpoint in which only the layers are quantised": is_packed(model) and not read,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(why)
    return find_layers(model)


def is_encoder(config: PreTrainedConfig, kind: type | None) -> bool:
    """Whether a model of the class `kind` with this config is an encoder: BERT and its like, with or without a head.

    It is one if transformers has a masked language model for its config, and `kind` is not the causal class for it.
    """
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or getattr(config, "is_decoder", False):
        return False
    return kind is not MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def find_layers(model: PreTrainedModel) -> Structure:
    """The structure of any transformer with one stack of layers.

    It is the largest module list whose length is one of the settings `LAYER_COUNTS` of the text config. Raises
    LyapunovPruneError if there is no such list.
    """
    config = model.config.get_text_config(decoder=True)
    kind = f"{type(model).__name__} ({config.model_type})"
    lengths = {name: getattr(config, name) for name in LAYER_COUNTS if getattr(config, name, None)}
    why = f"keeps no module list of its {list(lengths.values())[-1]} layers" if lengths else "counts no decoder layers"
    for count, length in lengths.items():
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == length
        }
        if not lists:
            continue
        # Packed weights may be buffers.
        sizes = {n: sum(t.numel() for t in [*m.parameters(), *m.buffers()]) for n, m in lists.items()}
        path = max(lists, key=lambda name: sizes[name])
        parent = path.rpartition(".")[0]
        parts = [name for name in lists if name.rpartition(".")[0] == parent and sizes[name] > sizes[path] / 4]
        if len(parts) > 1:
            why = f"keeps the parts of its layers in separate lists, {', '.join(parts)}"
            break
        return Structure(
            model_type=family_of(config),
            backbone=backbone_of(model, path),
            layers=lists[path],
            layers_path=path,
            config=config,
            count=count,
        )
    raise LyapunovPruneError(f"{kind} {why}; this decoder is not supported")


def backbone_of(model: PreTrainedModel, layers_path: str) -> nn.Module:
    """`model` without its head; for Llama 4 and Mllama, which name no base model, the module that holds the layers."""
    return model.base_model if model.base_model is not model else model.get_submodule(layers_path.rpartition(".")[0])


@torch.no_grad()
def require_causal(model: PreTrainedModel) -> None:
    """Raise LyapunovPruneError if an output depends on a later token, or if there is none without an image.

    The last of four tokens is changed and the logits before it are compared, so no list of families is needed. Raises
    it too for a router that should choose more experts than there are.
    """
    kind = type(model).__name__
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(4, device=model.device).remainder(vocabulary).expand(2, 4).clone()
    ids[1, -1] = vocabulary - 1
    failures = TypeError, ValueError, AttributeError
    try:
        with reported(f"{kind} does not run on text only", "give its text model alone", *failures):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    except RuntimeError:
        require_choosable(model.config.get_text_config(decoder=True))
        raise
    if not torch.equal(logits[0].isfinite(), logits[1].isfinite()) or not torch.allclose(
        logits[0].nan_to_num(), logits[1].nan_to_num(), rtol=1e-2, atol=1e-4
    ):
        raise LyapunovPruneError(f"{kind} looks at later tokens (an encoder); give a causal decoder")


def random_ids(config: Any, rows: int, length: int) -> torch.Tensor:
    """The same random tokens at every call, on the CPU; `config` is a text config.

    None is padding: some families count positions past it in one forward, but not through a cache.
    """
    ids = torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    pad = getattr(config, "pad_token_id", None)
    return ids if pad is None else ids.where(ids != pad, (pad + 1) % config.vocab_size)


def in_eval_mode(measure: Callable[P, T]) -> Callable[P, T]:
    """Run a function with every model among its arguments in eval mode and without gradients; both are restored.

    A handle counts as its model. `from_config` returns models in training mode, whose dropout would be measured as an
    error. What needs gradients enters `torch.enable_grad()` itself. RWKV rescales its weights here: otherwise it does
    so in place at its first forward in eval mode, which may use replaced matrices and would rescale those. No other
    thread may use these models meanwhile (`held`).
    """

    @wraps(measure)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        given = [a if isinstance(a, nn.Module) else getattr(a, "model", None) for a in (*args, *kwargs.values())]
        models = [model for model in given if isinstance(model, nn.Module)]
        training: list[nn.Module] = []
        with held(*models), torch.no_grad():
            try:
                for model in models:
                    for module in model.modules():
                        if module.training:
                            module.training = False
                            training.append(module)
                        if hasattr(module, "layers_are_rescaled") and stream_of(model) is None:
                            module._rescale_layers()  # type: ignore[operator]
                return measure(*args, **kwargs)
            finally:
                for module in training:
                    module.training = True

    return run


@in_eval_mode
def settle(model: PreTrainedModel) -> None:
    """Run a model with packed weights once, since kernels may convert the weights at the first forward.

    bitsandbytes on the CPU does, and its numbers before differ from those that are measured. Raises LyapunovPruneError
    if the model does not run.
    """
    if not is_packed(model) or model in _settled:
        return
    what = f"the weights are {quantisation(model.config)}, and they do not run here"
    with reported(what, UNPACK, Exception):  # raised by the kernels
        model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    _settled.add(model)


def model_name(model: PreTrainedModel) -> str:
    """What the model was loaded from, or else its class."""
    return model.config._name_or_path or type(model).__name__


def identify(model: PreTrainedModel, weights: dict[str, str] | None = None) -> ModelIdentity:
    """The identity of a model: names and shapes of all parameters, digests of all weights, and settings.

    `weights` are the digests of a model whose weights are elsewhere, such as on disk; None computes them.
    """
    stream = stream_of(model)
    if weights is None:
        settle(model)
        weights = weight_digests(model) if stream is None else stream.digests
    structure = find_layers(model)
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)};".encode())
    return ModelIdentity(
        name=model_name(model),
        model_type=structure.model_type,
        num_layers=structure.num_layers,
        parameters=model.num_parameters(),
        architecture=digest.hexdigest(),
        weights=weights,
        settings=forward_settings(model),
    )
