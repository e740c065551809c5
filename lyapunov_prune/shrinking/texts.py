"""The texts of a run: one to choose, mend and heal by, a second that judges mending, and one that no step sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.data.batch import TokenBatch, checked_batch, require_context, require_disjoint
from lyapunov_prune.data.text import load_text
from lyapunov_prune.data.unseen import require_unseen
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.judging import EVERY, POWER
from lyapunov_prune.forward.own_text import written_by
from lyapunov_prune.forward.reading import read
from lyapunov_prune.mending.judge import second_text
from lyapunov_prune.models.decoder import in_memory
from lyapunov_prune.models.structure import find_structure

TOKENS, CONTEXT = 25600, 256  # of the text that the model writes, as for `heal`
EVALUATED, WIDE = 4096, 512  # tokens and context, as of `eval`
_SEARCHED = 16  # windows that choose, at the least


@dataclass(frozen=True)
class Texts:
    """`learn` teaches every step, `judge` judges mending beside it, `held_out` evaluates; None is made by `filled`."""

    learn: TokenBatch | None
    judge: TokenBatch | None
    held_out: TokenBatch | None
    tokens: int
    context: int

    @property
    def windows(self) -> int:
        return len(self.learn) if self.learn is not None else self.tokens // self.context

    @property
    def width(self) -> int:
        return self.learn.context if self.learn is not None else self.context

    @property
    def evaluated(self) -> int:
        """The tokens that evaluate."""
        return EVALUATED if self.held_out is None else self.held_out.tokens

    def searched(self, model: PreTrainedModel) -> int:
        """How many windows choose and mend: enough that a map sees as many tokens as the model is wide."""
        hidden = find_structure(model).config.hidden_size
        # Half of them are scored, and three fourths of that half are fitted on.
        needed = -(-(8 * hidden // 3 + self.width) // self.width) + 4
        return min(self.windows, max(_SEARCHED, needed))

    def require(self, model: PreTrainedModel) -> None:
        """Raise LyapunovPruneError, before anything is written or measured, for texts that cannot judge."""
        structure = find_structure(model)
        require_context(structure, self.width)
        least = EVERY * POWER
        if self.windows < least:
            raise LyapunovPruneError(
                f"{self.windows} windows of {self.width} tokens are too few to judge by; give {least * self.width:,} "
                f"tokens or more, {least} windows of this context"
            )
        given = [text for text in (self.learn, self.judge, self.held_out) if text is not None]
        for text in given:
            checked_batch(structure, text)
        for one, other in combinations(given, 2):
            require_disjoint(one, other)

    def filled(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path | None, resume: bool
    ) -> tuple[TokenBatch, TokenBatch, TokenBatch]:
        """All three: where none is given the model writes what teaches, and the built-in text judges and evaluates."""
        held_out = self.held_out
        if held_out is None:
            wide = find_structure(model).at_most(WIDE)
            held_out = load_text("builtin", tokenizer, tokens=EVALUATED, context=wide, split="evaluation")
        require_unseen(model, held_out)
        judge = self.judge
        if judge is None and self.learn is None:
            tokens = self.searched(model) // 2 * self.context
            judge = load_text("builtin", tokenizer, tokens=tokens, context=self.context)
        replace(self, judge=judge, held_out=held_out).require(model)  # before minutes of writing
        learn = self.learn
        if learn is None:
            place = None if folder is None else folder / "text"
            learn = written_by(model, "calibration", self.tokens, self.context, folder=place, resume=resume)
        if judge is None:
            judge = second_text(read(in_memory(model), learn))
        replace(self, learn=learn, judge=judge, held_out=held_out).require(model)
        return learn, judge, held_out
