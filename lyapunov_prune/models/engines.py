"""What serving engines and converters would do wrong with a checkpoint whose layers no longer follow a pattern.

Some derive a layer's kind from its number although the config lists it. Each row of `SHORT_CUTS` has the thread or
source file that shows it; a newer version of an engine may have fixed it. No engine is run: a checkpoint is compared
with these rows, and one without findings may still fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lyapunov_prune.models.compact import PREFIX
from lyapunov_prune.models.folder import read_config
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.loading import checkpoint_folder
from lyapunov_prune.models.structure import LAYER_COUNTS

ALL = ""  # every family
_QWEN_WINDOWS = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_QWEN_HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_LLAMA4 = ("llama4", "llama4_text")


@dataclass(frozen=True)
class Told:
    """What a checkpoint says about its layers: the text config of a folder; None for a GGUF file."""

    family: str
    layers: int
    config: Any = None

    def full(self) -> list[bool]:
        """For each layer, whether it attends to all tokens; True if the config does not tell kinds of layers apart."""
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * self.layers
        return [kind == "full_attention" for kind in kinds]


@dataclass(frozen=True)
class ShortCut:
    """What `engine` does with checkpoints of `families`, with the `thread` that shows it.

    `trips` names the layers that the engine would run or load as another kind; "" if there are none. A `periodic` short
    cut does no harm if whole periods were removed.
    """

    engine: str
    families: tuple[str, ...]
    does: str
    thread: str
    trips: Callable[[Told], str]
    periodic: bool = True


def _layers(wrong: Iterable[int]) -> str:
    found = list(wrong)
    return f"layer{'s' * (len(found) > 1)} {', '.join(map(str, found))}" if found else ""


def _other(real: list[bool], taken: list[bool]) -> str:
    return _layers(i for i, (a, b) in enumerate(zip(real, taken, strict=True)) if bool(a) != b)


def _every(told: Told, period: int) -> list[bool]:
    """For each layer, whether it is the last of its period."""
    return [layer % period == period - 1 for layer in range(told.layers)]


def _full_each(told: Told, period: int | None = None) -> str:
    """The layers whose kind of attention (full or not) differs from what their position in the period says."""
    if told.config is None:
        return ""
    period = period or getattr(told.config, "full_attention_interval", None) or 4
    return _other(told.full(), _every(told, period))


def _windowed(told: Told) -> str:
    kinds = getattr(told.config, "layer_types", None) or []
    return _layers(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _without_rope(told: Told) -> str:
    rope = getattr(told.config, "no_rope_layers", None)
    return _other([not each for each in rope], _every(told, 4)) if rope else ""


def _experts_each(told: Told) -> str:
    step, experts = (getattr(told.config, name, None) for name in ("interleave_moe_layer_step", "moe_layers"))
    if not step or experts is None:
        return ""
    return _other([layer in experts for layer in range(told.layers)], _every(told, step))


def _without_experts(told: Told) -> str:
    dense, step = getattr(told.config, "mlp_only_layers", None) or [], getattr(told.config, "decoder_sparse_step", 1)
    return _layers(i for i in range(told.layers) if i in dense or (i + 1) % (step or 1))


def _scaled(told: Told, depth: int) -> str:
    """The wrong scale of an engine that chooses it by whether the model has `depth` layers; "" if it is right."""
    config = told.config
    if config is None:
        return ""
    deep = told.layers == depth
    width = config.hidden_size // config.num_attention_heads if deep else config.head_dim
    real = config.query_pre_attn_scalar
    return "" if real == width else f"a scale of 1/√{width} in place of 1/√{real}, by the {told.layers} layers"


def _compact(told: Told) -> str:
    kind = str(getattr(told.config, "model_type", ""))
    return f"{kind} has code of its own" if kind.startswith(PREFIX) else ""


def _window_ignored(engine: str, families: tuple[str, ...], thread: str) -> ShortCut:
    return ShortCut(engine, families, "runs layers with a window without it", thread, _windowed, periodic=False)


def _every_fourth(engine: str, families: tuple[str, ...], thread: str) -> ShortCut:
    does = "takes every fourth layer for the one without positions"
    return ShortCut(engine, families, does, thread, _without_rope)


def _assumed_period(families: tuple[str, ...], word: str, period: int, thread: str) -> ShortCut:
    does = f"takes every {word} layer for the one without a window, where the file says no other period"
    return ShortCut("llama.cpp", families, does, thread, partial(_full_each, period=period))


_LLAMA_CPP = "ggml-org/llama.cpp"
SHORT_CUTS = (
    ShortCut(
        "vLLM",
        ("gpt_oss",),
        "gives a window to layers of even number and none to the others",
        "vllm-project/vllm#33594",
        partial(_full_each, period=2),
    ),
    _window_ignored("vLLM", ("qwen3", "qwen3_moe"), "vllm-project/vllm#39514"),
    _window_ignored("SGLang", _QWEN_WINDOWS, "sgl-project/sglang#22528, #4693"),
    _every_fourth("SGLang", _LLAMA4, "sgl-project/sglang, python/sglang/srt/models/llama4.py"),
    ShortCut(
        "llama.cpp",
        _QWEN_HYBRID,
        "was converted with one interval of attention, and runs linear layers as attention and the other way round",
        f"{_LLAMA_CPP}#28207",
        _full_each,
    ),
    _window_ignored("llama.cpp", ("qwen3",), f"{_LLAMA_CPP}#26286"),
    _assumed_period(("gemma2", "gpt_oss"), "second", 2, f"{_LLAMA_CPP}, src/models/gemma2.cpp"),
    _assumed_period(("gemma3", "gemma3_text"), "sixth", 6, f"{_LLAMA_CPP}, src/models/gemma3.cpp"),
    _every_fourth("llama.cpp", ("smollm3", *_LLAMA4), f"{_LLAMA_CPP}#14581, src/models/llama4.cpp"),
    ShortCut(
        "llama.cpp",
        _LLAMA4,
        "looks for experts in layers at an interval, and does not load",
        f"{_LLAMA_CPP}, src/models/llama4.cpp",
        _experts_each,
    ),
    ShortCut(
        "llama.cpp",
        ("qwen3_moe",),
        "looks for experts in every layer, and does not load",
        f"{_LLAMA_CPP}, src/models/qwen3moe.cpp",
        _without_experts,
        periodic=False,
    ),
    ShortCut(
        "llama.cpp",
        ("gemma2",),
        "scales attention by the number of layers, 46 or not",
        f"{_LLAMA_CPP}, src/models/gemma2.cpp",
        partial(_scaled, depth=46),
        periodic=False,
    ),
    ShortCut(
        "Megatron-Bridge",
        (*_QWEN_HYBRID, "qwen3_next"),
        "takes one interval of attention for all layers, and imports weights into layers of the other kind",
        "NVIDIA-NeMo/Megatron-Bridge#4843",
        _full_each,
    ),
    ShortCut(
        "llm-compressor's AWQ",
        ("qwen3_next",),
        "maps attention to layers 3, 7, 11, … by number",
        "vllm-project/llm-compressor#2260",
        partial(_full_each, period=4),
    ),
    ShortCut(
        "vLLM, SGLang and llama.cpp",
        (ALL,),
        "do not serve this compact format",
        "docs/removing-layers.md#two-formats",
        _compact,
        periodic=False,
    ),
)


def short_cuts_of(name: str) -> list[tuple[ShortCut, str]]:
    """The rows of `SHORT_CUTS` that the checkpoint `name` trips, each with the layers; no weights are read.

    `name` is a folder or a GGUF file; raises LyapunovPruneError for anything else.
    """
    told = _told(name)
    found = [(row, row.trips(told)) for row in SHORT_CUTS if ALL in row.families or told.family in row.families]
    return [(row, where) for row, where in found if where]


def _told(name: str) -> Told:
    if name.endswith(".gguf"):
        header = read_header(Path(name))
        return Told(header.architecture, header.layers)
    config = read_config(checkpoint_folder(name))
    text = config.get_text_config(decoder=True)
    layers = next((n for count in LAYER_COUNTS if (n := getattr(text, count, None))), 0)
    return Told(str(text.model_type), layers, text)
