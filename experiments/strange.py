"""Kinds of faults that somebody planted who had not read the tests of `diagnosis`, from threads about broken files.

Each changes a dense model in place, before everything is rounded, and returns the tensors that it touched. `FORMS`
are changes that are no fault.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tokenizers import normalizers, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments.planted import HEAD, INNER, WIDTH, Fault, byte_tokenizer, each, named, rotary

_Plant = Callable[[PreTrainedModel], list[str]]
_LAYER = r"layers\.2\..*"
DOWN, UP, OUT, Q, K, V = (rf"{_LAYER}{name}_proj.weight" for name in ("down", "up", "o", "q", "k", "v"))
_QKV = rf"{_LAYER}[qkv]_proj.weight"
_NORMS = r"layers.*input_layernorm"
_FAMILIES = ("llama", "qwen2")
# Tables of 4-bit values as bitsandbytes has them.
_NF4 = torch.tensor(
    [
        -1,
        -0.6962,
        -0.5251,
        -0.3949,
        -0.2844,
        -0.1848,
        -0.0911,
        0,
        0.0796,
        0.1609,
        0.2461,
        0.3379,
        0.4407,
        0.5626,
        0.723,
        1.0,
    ]
)
_FP4 = torch.tensor([0, 0.0052, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25])
_FP4 = torch.cat([_FP4, -_FP4])


def _together(*patterns: str, change: Callable[..., tuple[torch.Tensor, ...]]) -> _Plant:
    """A fault that makes the matrices of each layer, one a pattern, out of all of them."""

    @torch.no_grad()
    def plant(model: PreTrainedModel) -> list[str]:
        found = [named(model, pattern) for pattern in patterns]
        for some in zip(*(group.values() for group in found), strict=True):
            for parameter, made in zip(some, change(*(p.detach().clone() for p in some)), strict=True):
                parameter.copy_(made)
        return [name for group in found for name in group]

    return plant


def _split(stacked: torch.Tensor, *like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return stacked.split([len(W) for W in like])


def _by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    groups = [W.view(2, -1, W.shape[1]) for W in (q, k, v)]
    return _split(torch.cat(groups, 1).reshape(-1, q.shape[1]), q, k, v)


def _parts(W: torch.Tensor, order: list[int], axis: int = 0) -> torch.Tensor:
    pieces = W.chunk(max(order) + 1 if max(order) else 2, axis)
    return torch.cat([pieces[i] for i in order], axis)


def _next_layer(pattern: str) -> _Plant:
    """Each of these tensors is that of the next layer, the last one aside."""

    @torch.no_grad()
    def plant(model: PreTrainedModel) -> list[str]:
        found = named(model, pattern)
        values = [parameter.detach().clone() for parameter in found.values()]
        for parameter, other in zip(found.values(), values[1:], strict=False):
            parameter.copy_(other)
        return list(found)[:-1]

    return plant


def _flat(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda W: change(W.flatten()).view(W.shape)


def _zeros(start: float, end: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(w: torch.Tensor) -> torch.Tensor:
        w[int(start * len(w)) : int(end * len(w))] = 0
        return w

    return _flat(changed)


def _flipped(W: torch.Tensor) -> torch.Tensor:
    W[10, 40] = -1.5e3 * W[10, 40]
    return W


def _new(model: PreTrainedModel, found: dict[str, nn.Parameter]) -> list[str]:
    with torch.no_grad():
        for parameter in found.values():
            parameter.normal_(std=model.config.initializer_range) if parameter.ndim > 1 else parameter.fill_(1)
    return list(found)


def _low_rank(W: torch.Tensor) -> torch.Tensor:
    D = torch.randn(len(W), 4) @ torch.randn(4, W.shape[1])
    return D * (W.norm() / D.norm())


def _smooth(W: torch.Tensor) -> torch.Tensor:
    return W * torch.exp(0.7 * torch.randn(W.shape[-1], generator=torch.Generator().manual_seed(3)))


def hadamard(n: int) -> torch.Tensor:
    H = torch.ones(1, 1)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / n**0.5


def _integers(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ends: float = 7
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of the integers of 4 bits and the scales of groups of 32: (groups, 32) and (groups, 1) of each row."""

    def changed(W: torch.Tensor) -> torch.Tensor:
        w = W.reshape(len(W), -1, 32)
        scale = w.abs().amax(-1, keepdim=True) / ends
        return change((w / scale).round(), scale).reshape(W.shape)

    return changed


def _tables(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _FP4[((q / 7).unsqueeze(-1) - _NF4).abs().argmin(-1)] * scale


def _experts(model: PreTrainedModel) -> list[str]:
    with torch.no_grad():
        for parameter in (found := named(model, r"layers\.2\..*experts\.down")).values():
            parameter[[1, 3]] = parameter[[3, 1]]
    return list(found)


STRANGE = (
    Fault(
        "stacked gate and up split as interleaved",
        ("permuted",),
        _together(rf"{_LAYER}gate_proj", UP, change=lambda a, b: (torch.cat([a, b])[::2], torch.cat([a, b])[1::2])),
        _FAMILIES,
    ),
    Fault("q, k and v by groups split as stacked", ("permuted",), _together(Q, K, V, change=_by_group), _FAMILIES),
    Fault("key rows permuted as for all heads", ("permuted",), each(K, lambda W: rotary(W, HEAD // 2)), _FAMILIES),
    Fault(
        "rotary layout changed twice", ("permuted",), each(rf"{_LAYER}[qk]_proj.weight", lambda W: rotary(rotary(W)))
    ),
    Fault("biases alone in the other rotary layout", ("permuted",), each(r"[qk]_proj.bias", rotary), ("qwen2",)),
    Fault(
        "query heads by key instead of by group",
        ("permuted",),
        each(Q, lambda W: W.view(2, 2, HEAD, -1).transpose(0, 1).reshape(W.shape)),
    ),
    Fault("four shards in another order", ("permuted",), each(UP, lambda W: _parts(W, [0, 2, 1, 3])), _FAMILIES),
    Fault("a shard twice", ("repeated",), each(DOWN, lambda W: _parts(W, [0, 0], 1)), _FAMILIES),
    Fault(
        "shards joined at the wrong axis",
        ("transposed",),
        each(DOWN, lambda W: torch.cat(W.chunk(2, 1)).reshape(W.shape)),
        _FAMILIES,
    ),
    Fault(
        "rows of the head of length one",
        ("scale",),
        each("lm_head", lambda W: W / W.norm(dim=1, keepdim=True)),
        _FAMILIES,
    ),
    Fault(
        "rows of added tokens their mean",
        ("constant",),
        each("embed_tokens", lambda W: torch.cat([W[:249], W[:249].mean(0).expand(10, -1)])),
    ),
    Fault(
        "rows of added tokens random",
        ("initialised",),
        each("embed_tokens", lambda W: torch.cat([W[:249], 0.02 * torch.randn(10, WIDTH)])),
    ),
    Fault(
        "the row of EOS is that of BOS",
        ("permuted",),
        each("lm_head", lambda W: torch.cat([W[:2], W[1:2], W[3:]])),
        _FAMILIES,
    ),
    Fault(
        "bfloat16 read as float16", ("type",), each(UP, lambda W: W.bfloat16().view(torch.float16).float()), _FAMILIES
    ),
    Fault("float16 read as bfloat16", ("type",), each(UP, lambda W: W.half().view(torch.bfloat16).float()), _FAMILIES),
    Fault("zeros from four fifths on", ("zero",), each(UP, _zeros(0.8, 1)), _FAMILIES),
    Fault("a page of zeros", ("zero",), each(UP, _zeros(0.3, 0.4)), _FAMILIES),
    Fault(
        "a page of another tensor",
        ("differs",),
        each(UP, _flat(lambda w: torch.cat([w[:2000], w[4000:5000], w[3000:]]))),
        _FAMILIES,
    ),
    Fault("a bit flipped", ("number",), each(DOWN, _flipped), _FAMILIES),
    Fault(
        "both norms exchanged in every layer",
        ("exchanged",),
        _together(_NORMS, "layers.*post_attention_layernorm", change=lambda a, b: (b, a)),
        _FAMILIES,
    ),
    Fault("norms squared", ("differs",), each(_NORMS, lambda w: (w + 0.5) ** 3), _FAMILIES),
    Fault("norms of the next layer", ("offset",), _next_layer(_NORMS), _FAMILIES),
    Fault("norms not loaded", ("constant",), each(_NORMS, torch.ones_like), _FAMILIES),
    Fault("a matrix not loaded", ("initialised",), lambda model: _new(model, named(model, DOWN)), _FAMILIES),
    Fault(
        "a layer's matrices not loaded",
        ("initialised",),
        lambda model: _new(model, named(model, rf"{_LAYER}proj.weight")),
        _FAMILIES,
    ),
    Fault(
        "an adapter without α / r", ("adapter",), each(r"[qv]_proj.weight", lambda W: W + 3 * _low_rank(W)), _FAMILIES
    ),
    Fault("an adapter alone", ("adapter",), each(r"[qv]_proj.weight", lambda W: 0.3 * _low_rank(W)), _FAMILIES),
    Fault("rows of length one", ("scale",), each(UP, lambda W: W / W.norm(dim=1, keepdim=True)), _FAMILIES),
    Fault("weights of a merge that add up to 0.7", ("scale",), each("proj.weight", lambda W: 0.7 * W), _FAMILIES),
    Fault("smoothing in the matrices alone", ("scale",), each(_QKV, _smooth), _FAMILIES),
    Fault("smoothing in the norms alone", ("differs",), each(_NORMS, _smooth), _FAMILIES),
    Fault("a rotation of inputs alone", ("rotated",), each(_QKV, lambda W: W @ hadamard(WIDTH)), _FAMILIES),
    Fault(
        "a rotation that the engine should undo",
        ("rotated",),
        each("down_proj", lambda W: W @ hadamard(INNER)),
        _FAMILIES,
    ),
    Fault(
        "unsigned integers read as signed",
        ("codes",),
        each(UP, _integers(lambda q, s: (q + 8).where(q < 0, q - 8) * s)),
        _FAMILIES,
    ),
    Fault("NF4 read as FP4", ("codes",), each(UP, _integers(_tables)), _FAMILIES),
    Fault(
        "integers that wrap around", ("codes",), each(UP, _integers(lambda q, s: ((q + 8) % 16 - 8) * s, 10)), _FAMILIES
    ),
    Fault(
        "minima dropped",
        ("zero point",),
        each(UP, _integers(lambda q, s: (q - q.amin(-1, keepdim=True)) * s)),
        _FAMILIES,
    ),
    Fault("scales of other rows", ("block scale",), each(UP, _integers(lambda q, s: q * s.flip(0))), _FAMILIES),
    Fault(
        "rows in AWQ's order, scales not",
        ("permuted",),
        each(UP, _integers(lambda q, s: q.view(-1, 8, *q.shape[1:])[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(q.shape) * s)),
        _FAMILIES,
    ),
    Fault(
        "eight integers of a word in reverse",
        ("permuted",),
        each(UP, _integers(lambda q, s: q.view(*q.shape[:2], 4, 8).flip(-1).reshape(q.shape) * s)),
        _FAMILIES,
    ),
    Fault("pruned of its large numbers", ("pruned",), each(UP, lambda W: W * (W.abs() < W.abs().median())), _FAMILIES),
    Fault(
        "gate and up interleaved in one tensor",
        ("permuted",),
        each("gate_up_proj", lambda W: torch.cat([W[..., ::2, :], W[..., 1::2, :]], -2)),
        ("mixtral", "phi3"),
    ),
    Fault("down projections of two experts exchanged", ("exchanged",), _experts, ("mixtral",)),
    Fault(
        "rows of the router shifted", ("permuted",), each(r"mlp\.gate\.weight", lambda W: W.roll(1, 0)), ("mixtral",)
    ),
    Fault(
        "all experts are the first",
        ("other tensor",),
        each(r"layers\.2\..*experts", lambda W: W[:1].expand_as(W)),
        ("mixtral",),
    ),
    Fault(
        "a tenth of the numbers wrong by its own size",
        ("differs",),
        each(DOWN, lambda W: W + 2 * W.std() * torch.randn_like(W) * (torch.rand_like(W) < 0.1)),
        _FAMILIES,
    ),
    Fault(
        "half of the numbers dropped at random",
        ("differs", "pruned"),
        each(DOWN, lambda W: W * (torch.rand_like(W) < 0.5)),
        _FAMILIES,
    ),
    Fault(
        "cut off to rank 4",
        ("differs", "adapter"),
        each(DOWN, lambda W: (lambda U, s, V: (U[:, :4] * s[:4]) @ V[:4])(*torch.linalg.svd(W, full_matrices=False))),
        _FAMILIES,
    ),
)


def _cycled(pattern: str, among: tuple[int, ...]) -> _Plant:
    """Layers of these numbers each hold the next one's tensors, the last the first's."""

    @torch.no_grad()
    def plant(model: PreTrainedModel) -> list[str]:
        found = [named(model, rf"layers\.{i}\.{pattern}") for i in among]
        values = [[p.detach().clone() for p in some.values()] for some in found]
        for some, others in zip(found, values[1:] + values[:1], strict=True):
            for parameter, other in zip(some.values(), others, strict=True):
                parameter.copy_(other)
        return [name for some in found for name in some]

    return plant


def _cycled_experts(model: PreTrainedModel) -> list[str]:
    with torch.no_grad():
        for parameter in (found := named(model, r"layers\.2\..*experts\.(gate_up|down)")).values():
            parameter[[1, 2, 3]] = parameter[[2, 3, 1]]
    return list(found)


def _halves(W: torch.Tensor) -> torch.Tensor:
    return torch.cat([W[128:256], W[:128], W[256:]])


def _scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of the scales (rows, groups) of 4 bits in groups of 32."""
    return _integers(lambda q, s: q * change(s[..., 0]).unsqueeze(-1))


def _by_tile(W: torch.Tensor) -> torch.Tensor:
    tiles = W.view(len(W) // 32, 32, -1, 32)
    return (tiles / tiles.abs().amax((1, 3), keepdim=True)).view(W.shape)


def _act_order(W: torch.Tensor) -> torch.Tensor:
    """Groups of 32 in the order of activations, their scales read as those of groups in the order of columns."""
    order = torch.randperm(W.shape[1], generator=torch.Generator().manual_seed(5))
    W = W * torch.exp(0.5 * torch.randn(W.shape[1], generator=torch.Generator().manual_seed(6)))
    q, s = (w := W[:, order].reshape(len(W), -1, 32)), w.abs().amax(-1, keepdim=True) / 7
    back = torch.empty_like(W)
    back[:, order] = (q / s).round().reshape(W.shape)
    return (back.reshape(len(W), -1, 32) * s).reshape(W.shape)


def _embedding_lost(model: PreTrainedModel) -> list[str]:
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_output_embeddings().weight)
    return ["model.embed_tokens.weight"]


def _tied(model: PreTrainedModel) -> list[str]:
    """As a file without a head is loaded, whose config ties it."""
    with torch.no_grad():
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.config.tie_word_embeddings = True
    return ["lm_head.weight"]


def _settings(**values: Any) -> _Plant:
    def plant(model: PreTrainedModel) -> list[str]:
        for name, value in values.items():
            setattr(model.config, name, value)
        return []

    return plant


def _inverted_windows(model: PreTrainedModel) -> list[str]:
    others = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
    model.config.layer_types = [others[kind] for kind in model.config.layer_types]
    return []


# A second list, written when the tests of the first had been mended, before those were read.
LATER = (
    Fault("q_norm alone in the other rotary layout", ("permuted",), each(r"q_norm", rotary), ("qwen3",)),
    Fault(
        "q_norm and k_norm exchanged",
        ("exchanged",),
        _together(r"q_norm", r"k_norm", change=lambda a, b: (b, a)),
        ("qwen3", "gemma3_text"),
    ),
    Fault(
        "weight and bias of norms exchanged",
        ("exchanged",),
        _together(r"h\.2\.ln_1\.weight", r"h\.2\.ln_1\.bias", change=lambda a, b: (b, a)),
        ("gpt2",),
    ),
    Fault("positions offset by two", ("permuted",), each("wpe", lambda W: W.roll(-2, 0)), ("gpt2",)),
    Fault("positions repeated from the half on", ("repeated",), each("wpe", lambda W: W[:128].repeat(2, 1)), ("gpt2",)),
    Fault(
        "query and key exchanged in one tensor",
        ("permuted",),
        each(r"h\.2\.attn\.c_attn\.weight", lambda W: torch.cat([W[:, 64:128], W[:, :64], W[:, 128:]], 1)),
        ("gpt2",),
    ),
    Fault(
        "biases of q, k and v by groups split as stacked",
        ("permuted",),
        _together(
            *(rf"{_LAYER}{name}_proj.bias" for name in "qkv"),
            change=lambda *b: tuple(w[:, 0] for w in _by_group(*(w.unsqueeze(1) for w in b))),
        ),
        ("qwen2",),
    ),
    Fault(
        "the embedding is the head",
        ("head", "other tensor"),
        _embedding_lost,
        _FAMILIES,
    ),
    Fault("two shards of the vocabulary in another order", ("permuted",), each("embed_tokens", _halves), _FAMILIES),
    Fault(
        "padding between two shards of the vocabulary",
        ("permuted", "zero"),
        each("embed_tokens", lambda W: torch.cat([W[:128], torch.zeros(4, WIDTH), W[128:-4]])),
        _FAMILIES,
    ),
    Fault(
        "three layers in another order",
        ("exchanged", "offset", "permuted", "other tensor"),
        _cycled(".*", (1, 2, 3)),
        _FAMILIES,
    ),
    Fault(
        "three experts in another order",
        ("exchanged", "permuted", "other tensor"),
        _cycled_experts,
        ("mixtral", "qwen3_moe"),
    ),
    Fault("scales of tiles not applied", ("block scale", "scale"), each(DOWN, _by_tile), _FAMILIES),
    Fault(
        "divided by the scale of each row",
        ("scale",),
        each(DOWN, lambda W: W / W.abs().amax(1, keepdim=True) ** 2),
        _FAMILIES,
    ),
    Fault(
        "groups of 64 where they are of 32",
        ("block scale",),
        each(DOWN, _scales(lambda s: s[:, ::2].repeat_interleave(2, 1))),
        _FAMILIES,
    ),
    Fault("scales read by columns", ("block scale",), each(DOWN, _scales(lambda s: s.mT.reshape(s.shape))), _FAMILIES),
    Fault("order of activations ignored", ("block scale", "scale", "differs"), each(DOWN, _act_order), _FAMILIES),
    Fault("scales as small as a half float holds", ("zero", "scale"), each(DOWN, lambda W: W * 6e-8), _FAMILIES),
    Fault(
        "an adapter merged three times",
        ("adapter",),
        each(r"[qv]_proj.weight", lambda W: W + 0.9 * _low_rank(W)),
        _FAMILIES,
    ),
    Fault("windows and full attention exchanged", ("setting",), _inverted_windows, ("gemma2", "gemma3_text")),
    Fault("every layer with a window", ("setting",), _settings(layer_types=["sliding_attention"] * 5), ("gemma2",)),
    Fault("no cap of the logits", ("setting",), _settings(final_logit_softcapping=None), ("gemma2",)),
    Fault("no multiplier of what layers add", ("setting",), _settings(residual_multiplier=1.0), ("granite",)),
    Fault("weights of experts not normalised", ("setting",), _settings(norm_topk_prob=False), ("qwen3_moe",)),
    Fault(
        "half of each head rotated",
        ("setting",),
        _settings(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("phi3",),
    ),
    Fault("not tied in DENSE, tied in FILE", ("head", "setting"), _tied, _FAMILIES),
)


def tokenizers() -> Iterator[tuple[str, str, PreTrainedTokenizerFast, PreTrainedTokenizerFast]]:
    """What is wrong, the kind of the finding, and the tokenizers of the dense model and of the file."""
    chat = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"

    def made(chat: str | None = chat, **changes: Any) -> PreTrainedTokenizerFast:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = chat
        for name, value in changes.items():
            setattr(tokenizer.backend_tokenizer, name, value)
        return tokenizer

    ends = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    without = chat.replace("messages %}", "messages if m['role'] != 'system' %}")
    yield "text in small letters", "tokenizer", made(), made(normalizer=normalizers.Lowercase())
    space = pre_tokenizers.ByteLevel(add_prefix_space=True)
    yield "a space before each text", "tokenizer", made(), made(pre_tokenizer=space)
    yield "EOS after each text", "tokenizer", made(), made(post_processor=ends)
    yield "no chat template", "template", made(), made(None)
    yield "a template with a syntax error", "template", made(), made(chat + "{% if")
    yield "a template without the system's turn", "template", made(), made(without)


def _projections(model: PreTrainedModel, layer: int, names: tuple[str, ...]) -> Iterator[torch.nn.Parameter]:
    for name in names:
        part = "self_attn" if name in "qkvo" else "mlp"
        yield model.get_parameter(f"model.layers.{layer}.{part}.{name}_proj.weight")


def _moved(model: PreTrainedModel, norm: str, names: tuple[str, ...], all_of_it: bool = False) -> None:
    for layer in range(model.config.num_hidden_layers):
        weight = model.get_parameter(f"model.layers.{layer}.{norm}.weight")
        scale = weight.clone() if all_of_it else torch.exp(0.7 * torch.randn(WIDTH))
        weight.div_(scale)
        for W in _projections(model, layer, names):
            W.mul_(scale)


def _folded(model: PreTrainedModel) -> None:
    _moved(model, "input_layernorm", ("q", "k", "v"), all_of_it=True)
    _moved(model, "post_attention_layernorm", ("gate", "up"), all_of_it=True)


def _balanced(model: PreTrainedModel) -> None:
    for layer in range(model.config.num_hidden_layers):
        up, down = _projections(model, layer, ("up", "down"))
        scale = torch.exp(0.7 * torch.randn(INNER))
        up.div_(scale[:, None])
        down.mul_(scale)


def _reordered(model: PreTrainedModel) -> None:
    for layer in range(model.config.num_hidden_layers):
        order = torch.randperm(INNER)
        gate, up, down = _projections(model, layer, ("gate", "up", "down"))
        gate.copy_(gate[order].clone())
        up.copy_(up[order].clone())
        down.copy_(down[:, order].clone())


def _rotated(model: PreTrainedModel) -> None:
    H = hadamard(HEAD)
    for layer in range(model.config.num_hidden_layers):
        v, o = _projections(model, layer, ("v", "o"))
        v.copy_((H.T @ v.view(-1, HEAD, WIDTH)).view(v.shape))
        o.copy_((o.view(WIDTH, -1, HEAD) @ H).view(o.shape))
        bias = getattr(model.model.layers[layer].self_attn.v_proj, "bias", None)
        if bias is not None:
            bias.copy_((bias.view(-1, HEAD) @ H).view(-1))


def _turned(model: PreTrainedModel) -> None:
    _folded(model)
    Q = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    model.lm_head.weight.mul_(model.model.norm.weight)
    model.model.norm.weight.fill_(1)
    for W in (model.lm_head.weight, model.model.embed_tokens.weight):
        W.copy_(W @ Q)
    for layer in range(model.config.num_hidden_layers):
        for W in _projections(model, layer, ("q", "k", "v", "gate", "up")):
            W.copy_(W @ Q)
        for W in _projections(model, layer, ("o", "down")):
            W.copy_(Q.T @ W)


# Other forms of a Llama-like model, in which what one tensor lost another one got: they compute the same.
FORMS: dict[str, Callable[[PreTrainedModel], None]] = {
    "norms folded into the matrices": _folded,
    "scales moved from norms into matrices": lambda model: _moved(model, "input_layernorm", ("q", "k", "v")),
    "scales moved from up into down": _balanced,
    "neurons in another order": _reordered,
    "values rotated in each head": _rotated,
    "all states rotated": _turned,
}


@torch.no_grad()
def in_form(model: PreTrainedModel, form: str) -> PreTrainedModel:
    """A copy of the model in this form."""
    made = copy.deepcopy(model)
    FORMS[form](made)
    return made
