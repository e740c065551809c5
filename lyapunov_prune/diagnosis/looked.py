"""A checkpoint with all that its tests ask of it, and how they name tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lyapunov_prune.diagnosis.expected import Expected
from lyapunov_prune.diagnosis.packed import PackedMatrix
from lyapunov_prune.diagnosis.statistics import TensorStatistics
from lyapunov_prune.diagnosis.stored import FileTensor, Stored
from lyapunov_prune.results.wording import ranges

_NAMED = 3
_NEIGHBOURS = 3  # layers on either side


@dataclass(frozen=True, eq=False)
class Looked:
    """A checkpoint, the statistics of its tensors by name, its packed matrices, and what its config says it holds."""

    stored: Stored
    found: Mapping[str, TensorStatistics]
    packed: Sequence[PackedMatrix]
    expected: Expected | None

    @cached_property
    def siblings(self) -> dict[str, list[TensorStatistics]]:
        """The statistics of the tensors of a role, by layer."""
        roles: dict[str, list[TensorStatistics]] = {}
        for each in sorted(self.found.values(), key=lambda each: (each.part.layer or 0, each.part.name)):
            roles.setdefault(each.part.role, []).append(each)
        return roles

    @cached_property
    def matrices(self) -> list[TensorStatistics]:
        """Tensors of two axes or more, at least 16 wide, whose numbers are read."""
        return [each for each in self.found.values() if each.is_read]

    @cached_property
    def norms(self) -> dict[str, np.ndarray]:
        """The sampled weights of norms, as they are used: 1 + w where the family adds the one."""
        names = {n: False for n in self.found if n.endswith("norm.weight")}  # llama.cpp's names, used as they are
        if self.expected is not None:
            names = dict(self.expected.norms or {})
        return {name: self.found[name].known + names[name] for name in names if name in self.found}

    @property
    def embedding(self) -> FileTensor | None:
        """The token embeddings."""
        ends = ("token_embd.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
        return next((part for name, part in self.stored.parts.items() if name.endswith(ends)), None)

    @property
    def head(self) -> FileTensor | None:
        """The matrix that makes logits, where it is read as numbers; the embeddings if the head has none of its own."""
        ends = ("output.weight", "lm_head.weight", "embed_out.weight")
        own = next((part for name, part in self.stored.parts.items() if name in ends), self.embedding)
        return own if own is not None and len(self.found[own.name].known) else None

    @property
    def ends(self) -> set[int]:
        """The ids that end a text, by the config or the header."""
        told = (
            [self.stored.header.read("tokenizer.ggml.eos_token_id")]
            if self.stored.header is not None
            else [self.stored.setting("eos_token_id"), self.stored.json("generation_config.json").get("eos_token_id")]
        )
        ids = [i for each in told for i in (each if isinstance(each, list) else [each])]
        return {i for i in ids if type(i) is int and i >= 0}


def named(parts: Iterable[FileTensor]) -> str:
    """The tensors in words, those of one role as `blk.20–29.attn_output.weight`."""
    roles: dict[str, list[FileTensor]] = {}
    for part in parts:
        roles.setdefault(part.role, []).append(part)
    told = [_of_role(role, some) for role, some in roles.items()]
    more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return ", ".join(f"`{name}`" for name in told[:_NAMED]) + more


def _of_role(role: str, parts: Sequence[FileTensor]) -> str:
    layers = {part.layer for part in parts} - {None}
    if len(parts) == 1 or len(layers) != len(parts) or role.count("*") != 1:
        return parts[0].name if len(parts) == 1 else f"{parts[0].name}` and {len(parts) - 1} of its siblings`"[:-1]
    return role.replace("*", ranges(sorted(layer for layer in layers if layer is not None)))


def far(values: Sequence[float], least: float) -> Iterator[int]:
    """The places of values that are far from the median of their neighbours, three on either side.

    Far is `least`, and four times what nine in ten of the others are from theirs.
    """
    q = np.asarray(values)
    off = np.array([
        abs(q[i] - np.median(np.delete(q[max(0, i - _NEIGHBOURS) : i + _NEIGHBOURS + 1], min(i, _NEIGHBOURS))))
        for i in range(len(q))
    ]) if len(q) > 4 else np.zeros(len(q))  # fmt: skip
    for i in np.flatnonzero(off > least):
        if off[i] > 4 * np.quantile(np.delete(off, i), 0.9):
            yield int(i)
