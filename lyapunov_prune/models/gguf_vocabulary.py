"""The vocabulary of a tokenizer in the header of a GGUF file.

llama.cpp does not read how a tokenizer splits text into words: `tokenizer.ggml.pre` names one of the ways it knows. The
name is found here from the splitting rule, not the vocabulary, so a retrained vocabulary keeps it.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import gguf
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from lyapunov_prune.errors import LyapunovPruneError, first_of
from lyapunov_prune.models.gguf_header import BOOL, FLOAT32, INT32, STRING, Value, array, number, text
from lyapunov_prune.models.tokenizers import token_ids

CONVERT = "convert it with llama.cpp's convert_hf_to_gguf.py"
# llama.cpp's names for a splitting regular expression: the first if words that the vocabulary holds whole skip merging
# (`ignore_merges`), the second otherwise.
_SPLITS = {
    GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]: ("llama-bpe", "dbrx"),
    GGUF_PRE_TOKENIZER_SPLITS["tekken"]: ("tekken", None),
    GGUF_PRE_TOKENIZER_SPLITS["qwen2"]: (None, "qwen2"),
    GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]: (None, "gpt-4o"),
}
_SPACE = "▁"  # SentencePiece's space
_ADDED, _ABSENT = -1000.0, -10000.0  # scores of tokens that no merge makes
_LOOKS_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")  # added tokens that count as special though not marked so


def vocabulary_values(tokenizer: PreTrainedTokenizerBase | None, size: int) -> dict[str, Value]:
    """The keys `tokenizer.*` for a model with `size` embeddings.

    Raises LyapunovPruneError for a tokenizer that llama.cpp lacks, or whose name there is unknown here.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if tokenizer is None or backend is None:
        raise LyapunovPruneError(f"the model has no fast tokenizer, and a GGUF file holds one; {CONVERT}")
    told = json.loads(backend.to_str())
    model = told["model"]
    spaced = bool(model.get("byte_fallback"))  # SentencePiece's BPE; otherwise GPT-2's byte-level BPE
    splitting, around = "default" if spaced else _splitting(told), _around(tokenizer)
    wrong = {
        f"is {model['type']}, and only BPE is written as GGUF; {CONVERT}": model["type"] != "BPE",
        # Added tokens beyond `size` have no embedding and are left out.
        f"has {len(model['vocab'])} tokens and the model {size}; give its own": len(model["vocab"]) > size,
        f"splits text in a way that llama.cpp does not support; {CONVERT}": splitting is None,
        f"adds tokens other than BOS and EOS around a text; {CONVERT}": around is None,
    }
    if why := first_of(wrong):
        raise LyapunovPruneError(f"the tokenizer {why}")
    assert splitting is not None
    assert around is not None
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens, types = _tokens(tokenizer, told, size, spaced)
    prefix = "tokenizer.ggml."
    values = {
        f"{prefix}model": text("llama" if spaced else "gpt2"),
        f"{prefix}pre": text(splitting),
        f"{prefix}tokens": array(STRING, tokens),
        f"{prefix}token_type": array(INT32, [int(kind) for kind in types]),
    }
    if spaced:
        values[f"{prefix}scores"] = array(FLOAT32, _scores(tokens, types, merges))
        values[f"{prefix}add_space_prefix"] = number(_prepends(told), BOOL)
    else:
        values[f"{prefix}merges"] = array(STRING, [" ".join(merge) for merge in merges])
    return values | _special(tokenizer, prefix, size, around)


def _tokens(
    tokenizer: PreTrainedTokenizerBase, told: dict[str, Any], size: int, spaced: bool
) -> tuple[list[str], list[gguf.TokenType]]:
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    added = {each["id"]: each for each in told["added_tokens"]}
    unknown = told["model"].get("unk_token")
    tokens, types = [], []
    for i in range(size):
        token = by_id.get(i)
        if token is None:
            token, kind = f"[PAD{i}]", gguf.TokenType.UNUSED
        elif spaced and token == unknown:
            kind = gguf.TokenType.UNKNOWN
        elif i in added and (added[i]["special"] or _looks_special(token)):
            kind = gguf.TokenType.CONTROL
        elif i in added:
            token, kind = token.replace(_SPACE, " "), gguf.TokenType.USER_DEFINED
        elif spaced and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kind = gguf.TokenType.BYTE
        else:
            kind = gguf.TokenType.NORMAL
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _looks_special(token: str) -> bool:
    pairs = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return token in _LOOKS_SPECIAL or any(token.startswith(a) and token.endswith(b) for a, b in pairs)


def _scores(tokens: list[str], types: list[gguf.TokenType], merges: list[list[str]]) -> list[float]:
    """Minus the rank of the first merge that makes each token; SentencePiece merges the highest score first."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    fixed = {gguf.TokenType.NORMAL: 0.0, gguf.TokenType.BYTE: 0.0, gguf.TokenType.UNUSED: _ABSENT}
    return [float(-ranks[t]) if t in ranks else fixed.get(kind, _ADDED) for t, kind in zip(tokens, types, strict=True)]


def _prepends(told: dict[str, Any]) -> bool:
    """Whether a space is put in front of the text."""
    normalizers, splitters = _steps(told["normalizer"], "normalizers"), _steps(told["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "Prepend" for step in normalizers) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in splitters
    )


def _splitting(told: dict[str, Any]) -> str | None:
    """llama.cpp's name of the splitting rule; None if it is unknown here."""
    name = None
    steps, normalizers = _steps(told["pre_tokenizer"], "pretokenizers"), _steps(told["normalizer"], "normalizers")
    kinds = [step["type"] for step in steps]
    plain = kinds[-1:] == ["ByteLevel"] and not steps[-1].get("add_prefix_space")
    if plain and all(step["type"] == "NFC" for step in normalizers):  # llama.cpp skips NFC
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            name = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
            name = "smollm"
        elif kinds == ["Split", "ByteLevel"] and steps[0]["behavior"] == "Isolated" and not steps[1]["use_regex"]:
            whole, merged = _SPLITS.get(steps[0]["pattern"].get("Regex"), (None, None))
            name = whole if told["model"].get("ignore_merges") else merged
    return name


def _steps(stage: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if stage is None:
        return []
    return [inner for each in stage[several] for inner in _steps(each, several)] if several in stage else [stage]


def _special(tokenizer: PreTrainedTokenizerBase, prefix: str, size: int, around: tuple[bool, bool]) -> dict[str, Value]:
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    values = {}
    for own, key in named.items():
        found = getattr(tokenizer, f"{own}_token_id")
        if found is not None and found < size:
            values[f"{prefix}{key}_token_id"] = number(found)
    values[f"{prefix}add_bos_token"] = number(around[0], BOOL)
    values[f"{prefix}add_eos_token"] = number(around[1], BOOL)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return values | ({"tokenizer.chat_template": text(template)} if template else {})


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool] | None:
    """Whether BOS is put before a text, and EOS after it; None if it is something else."""
    bare, whole = token_ids(tokenizer, "a"), token_ids(tokenizer, "a", special=True)
    before, after = [tokenizer.bos_token_id], [tokenizer.eos_token_id]
    pairs = product((False, True), repeat=2)
    return next(((a, b) for a, b in pairs if whole == before * a + bare + after * b), None)
