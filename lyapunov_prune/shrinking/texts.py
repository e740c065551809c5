"""The texts of a run: to choose and mend on, to heal on, to judge mending by, and two kinds that no step sees."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.data.batch import TokenBatch, checked_batch, require_context, require_disjoint
from lyapunov_prune.data.sources import BUILTIN, OWN
from lyapunov_prune.data.text import load_text
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import OF, POWER, require_windows
from lyapunov_prune.forward.own_text import written_by
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.judge import second_text
from lyapunov_prune.models.decoder import in_memory
from lyapunov_prune.models.structure import Structure, find_structure

TOKENS, CONTEXT = 25600, 256  # of the text that the model generates, as for `heal`
EVALUATED, WIDE = 4096, 512  # tokens and context of `eval`; `prune` chooses layers in windows of the same length
_SEARCHED = 16  # the fewest windows that choose layers


@dataclass(frozen=True)
class Texts:
    """`learn` heals, `judge` judges mending beside the text that chooses, `held_out` evaluates.

    `filled` supplies those that are None; `learn` then has `tokens` tokens in windows of `context`. `choose` is the
    text on which layers are chosen and gaps mended; if it is None, `learn` serves, or a text in wider windows that the
    model generates.
    """

    learn: TokenBatch | None
    judge: TokenBatch | None
    held_out: TokenBatch | None
    tokens: int
    context: int
    choose: TokenBatch | None = None

    @property
    def windows(self) -> int:
        return len(self.learn) if self.learn is not None else self.tokens // self.context

    @property
    def width(self) -> int:
        return self.learn.context if self.learn is not None else self.context

    @property
    def evaluated(self) -> int:
        """The number of tokens that evaluate."""
        return EVALUATED if self.held_out is None else self.held_out.tokens

    def searched(self, model: PreTrainedModel) -> tuple[int, int]:
        """The number and the width of the windows that choose and mend; a map must see as many tokens as the width."""
        structure = find_structure(model)
        given = self.choose or self.learn
        width = wide_context(structure, self.tokens, self.context) if given is None else given.context
        # Half of them are scored, and maps are fitted on three quarters of that half.
        needed = max(_SEARCHED, -(-(8 * structure.config.hidden_size // 3 + width) // width) + 4)
        return min(self.tokens // width if given is None else len(given), needed), width

    def require(self, model: PreTrainedModel) -> None:
        """Raise LyapunovPruneError for texts that cannot judge, before anything is generated or measured."""
        structure = find_structure(model)
        require_context(structure, self.width)
        least = OF * POWER
        if self.windows < least:
            raise LyapunovPruneError(
                f"{self.windows} windows of {self.width} tokens are too few to validate on; give at least "
                f"{least * self.width:,} tokens, {least} windows of this context"
            )
        for given, fewest in ((self.choose, 2 * POWER), (self.judge, POWER)):
            if given is not None:
                require_windows(given, fewest)
        teach = [text for text in (self.learn, self.choose) if text is not None]  # which may share their tokens
        judge = [text for text in (self.judge, self.held_out) if text is not None]
        for text in (*teach, *judge):
            checked_batch(structure, text)
        for one, other in (*product(teach, judge), *combinations(judge, 2)):
            require_disjoint(one, other)

    def filled(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path | None
    ) -> tuple[TokenBatch, TokenBatch, TokenBatch, TokenBatch]:
        """The text that chooses, then `learn`, `judge` and `held_out`.

        If no text is given, the model generates the text that teaches, and the built-in text judges and evaluates.
        """
        held_out, (windows, width) = self.held_out, self.searched(model)
        if held_out is None:
            wide = find_structure(model).at_most(WIDE)
            held_out = load_text(BUILTIN, tokenizer, tokens=EVALUATED, context=wide, split="evaluation")
        require_unseen(model, held_out)
        judge, learn, choose = self.judge, self.learn, self.choose or self.learn
        if judge is None and learn is None:
            judge = load_text(BUILTIN, tokenizer, tokens=windows // 2 * width, context=width)
        replace(self, judge=judge, held_out=held_out).require(model)  # before minutes of generation
        if choose is None and width != self.context:
            choose = written_by(model, "calibration", windows * width, width, folder=folder)
        if learn is None:
            learn = written_by(model, "calibration", self.tokens, self.context, folder=folder)
        choose = (choose or learn).take(range(windows))
        if judge is None:
            judge = second_text(read(in_memory(model), choose), folder)
        replace(self, learn=learn, judge=judge, held_out=held_out, choose=choose).require(model)
        return choose, learn, judge, held_out


def foreign_text(
    smaller: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Collection[TokenBatch], like: TokenBatch
) -> TokenBatch | None:
    """The first of `OWN` that is none of `texts`, and of which no step that made `smaller` saw a passage.

    Its evaluation half, in windows as long as those of `like`, as many but EVALUATED tokens at most. None if every one
    of `OWN` was used.
    """
    tokens = max(like.context, min(like.tokens, EVALUATED))
    for name in OWN:
        if name not in [text.text for text in texts]:
            with suppress(LyapunovPruneError):  # the text shares a passage with one of the user's, or is too short
                found = load_text(name, tokenizer, tokens=tokens, context=like.context, split="evaluation")
                require_unseen(smaller, found)
                return found
    return None


def wide_context(structure: Structure, tokens: int, context: int) -> int:
    """The width of the windows that choose: WIDE if `tokens` fill enough such windows, at least `context`."""
    wide = structure.at_most(WIDE)
    return wide if wide > context and tokens >= _SEARCHED * wide else context
