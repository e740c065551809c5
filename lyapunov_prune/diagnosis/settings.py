"""Settings, tokenizer and chat template of a file against those of the dense model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

from accelerate import init_empty_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.diagnosis.finding import Finding
from lyapunov_prune.diagnosis.sides import Sides
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.settings import FIRST_LAYERS, INDEX_LISTS, LAST_LAYERS, forward_settings
from lyapunov_prune.models.tokenizers import chat_text, different_ids, token_ids
from lyapunov_prune.results.result import differing

# Told by the tensors themselves, or by counts of layers and tokens, which are asked elsewhere.
_ELSEWHERE = re.compile(r"tie_word_embeddings|num_hidden_layers|n_layers?|vocab_size|\w*_bias")
# They may matter only in longer windows than those that are measured.
LATER = re.compile(r"rope|rotary|sliding|window|layer_types|max_position")
_CHAT = [{"role": "user", "content": "Hello"}]
_LONG = [{"role": "system", "content": "Be brief."}, *_CHAT, {"role": "assistant", "content": "Hi"}, *_CHAT]


def changed_settings(sides: Sides) -> dict[str, str]:
    """What is said of each setting that can change a forward and differs, by its name in the config.

    Settings that only one config has do not count, nor do lists over layers if layers were removed.
    """
    mine, theirs = (forward_settings(side.model) for side in (sides.dense, sides.file))
    removed = len(sides.layers) < sides.dense.structure.num_layers
    told: dict[str, list[str]] = {}
    for name, a, b in differing(mine, theirs):
        outer, _, inner = name.partition(".")
        if isinstance(getattr(sides.file.model.config, outer, None), type(sides.file.model.config)):
            outer = name
        counts = name in (*INDEX_LISTS, *FIRST_LAYERS, *LAST_LAYERS)
        listed = (counts and removed) or (isinstance(a, list) and isinstance(b, list) and len(a) != len(b))
        if not (_ELSEWHERE.fullmatch(name.rpartition(".")[2]) or listed):
            told.setdefault(outer, []).append(f"`{inner or outer}` of FILE is {_short(b)}, that of DENSE {_short(a)}")
    return {name: "; ".join(parts) for name, parts in told.items()}


def _short(value: Any) -> str:
    return "missing" if value is None else str(value)[:60]


def with_setting(sides: Sides, name: str, measure: Callable[[PreTrainedModel], float]) -> float | None:
    """`measure` of the file's model with this setting of DENSE, in the same memory; None if it does not fit in."""
    config, dense = copy.deepcopy(sides.file.model.config), sides.dense.model.config
    try:
        setattr(config, name, copy.deepcopy(getattr(dense, name)))
        with quiet(), init_empty_weights(include_buffers=False):
            made: Any = type(sides.file.model)._from_config(config)
        made.load_state_dict(sides.file.model.state_dict(), strict=False, assign=True)
        if any(parameter.is_meta for parameter in made.parameters()):
            return None
        return measure(made.to(sides.file.model.device, sides.file.model.dtype).eval())
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError):  # classes check their config as they like
        return None


def missing_biases(sides: Sides) -> Iterator[Finding]:
    """Biases that one of both lacks.

    Statistic: names. Threshold: one name. No false alarm, except for a method that folds biases away.
    """
    mine, theirs = set(sides.dense.model.state_dict()), set(sides.file.model.state_dict())
    kept = (sides.dense.structure.renamed(name, sides.layers) for name in mine)
    ours = {name for name in kept if name is not None}
    cause = "a converter that knows the family without biases, or a config key lost (attention_bias)"
    for names, said in (
        (sorted(name for name in ours - theirs if name.endswith("bias")), "FILE lacks"),
        (sorted(name for name in theirs - ours if name.endswith("bias")), "FILE has, and DENSE has not,"),
    ):
        if names:
            first = f"`{names[0]}`" + (f" and {len(names) - 1} more biases" if len(names) > 1 else "")
            yield Finding("bias", tuple(names), f"{said} {first}.", "certain", cause, "convert it again")


def tokenizer_faults(sides: Sides, size: int) -> Iterator[Finding]:
    """Another order of the vocabulary, other ids for one text, other BOS and EOS, and another chat template.

    Statistics: the token of every id below `size`; the ids of texts on which tokenizers differ; the ids of BOS and EOS,
    and those at which the model ends a text; two chats, and how many BOS begin them. Threshold: one difference. GGUF
    files may name fewer special tokens and split text otherwise, so a missing one counts only if its id is used, and
    only the ids of the vocabulary are compared.
    """
    for kind, said, cause, files in _differences(sides, size):
        yield Finding(kind, (), f"{said}.", "certain", cause, f"take DENSE's {files}")


def _differences(sides: Sides, size: int) -> Iterator[tuple[str, str, str, str]]:
    """The kind, what is said, the known cause, and the files to take."""
    files, base = "tokenizer files", "or a base model's where the chat model has its own"
    ends, others = (_ends(side.model) for side in (sides.dense, sides.file))
    if ends and others and not (ends & others if sides.is_gguf else ends <= others):
        said = f"FILE ends a text at id {', '.join(map(str, others))}, DENSE at {', '.join(map(str, ends))}"
        yield "EOS", said, f"a generation config that was lost, {base}", "generation_config.json"
    dense, file = sides.dense.tokenizer, sides.file.tokenizer
    if dense is None or file is None:
        return
    mine, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (dense, file))
    other = [i for i in sorted(mine.keys() & theirs.keys()) if i < size and mine[i] != theirs[i]]
    if other:
        i = other[0]
        said = f"{len(other):,} ids are other tokens in FILE, the first {i}: {theirs[i]!r}, in DENSE {mine[i]!r}"
        yield "vocabulary", said, "a tokenizer of another version, or added tokens in another order", files
    elif not sides.is_gguf and (text := different_ids(dense, file)) is not None:
        yield "tokenizer", text, "merges, a normaliser or added tokens lost by another version", files
    for what in ("bos", "eos"):
        a, b = (getattr(tokenizer, f"{what}_token_id", None) for tokenizer in (dense, file))
        if a is not None and b is not None and a != b:
            told = f"The {what.upper()} token of FILE is {b} ({theirs.get(b)!r}), that of DENSE {a} ({mine.get(a)!r})"
            yield what.upper(), told, f"a header key set by hand, {base}", files
    counts = [_leading_bos(tokenizer) for tokenizer in (dense, file)]
    if None not in counts and counts[1] != counts[0]:
        said = f"A chat begins with {counts[1]} BOS tokens in FILE, with {counts[0]} in DENSE"
        yield "template", said, "a template that writes BOS for a tokenizer that adds it too", "chat template"
    for chat in _CHAT, _LONG:
        texts = [_chat(tokenizer, chat) for tokenizer in (dense, file)]
        if texts[0] is None or texts[0] == texts[1]:
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[1] or "", strict=False)))
        a, b = (text and repr(text[same : same + 60]) for text in texts)
        said = (
            f"The chat template of FILE writes {b}, that of DENSE {a}" if b else "FILE has no chat template that works"
        )
        yield "template", said, "a template of another version", "chat template"
        return


def _ends(model: Any) -> set[int]:
    """The ids at which the model ends a text."""
    told = getattr(model.generation_config, "eos_token_id", None)
    told = getattr(model.config, "eos_token_id", None) if told is None else told
    return {each for each in (told if isinstance(told, list) else [told]) if isinstance(each, int)}


def _chat(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]] = _CHAT) -> str | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return chat_text(tokenizer, chat, "a greeting", answer=True)
    except LyapunovPruneError:
        return None


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """How many BOS begin a chat that is tokenised as a text, as engines do; None without a template."""
    text, bos = _chat(tokenizer), tokenizer.bos_token_id
    if text is None or bos is None:
        return None
    ids = token_ids(tokenizer, text, special=True)
    return next((i for i, token in enumerate(ids) if token != bos), len(ids))
