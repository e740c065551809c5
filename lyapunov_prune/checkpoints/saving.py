"""Write a changed model of unchanged shape as a plain transformers checkpoint, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.cards import as_text, write_card
from lyapunov_prune.checkpoints.elsewhere import elsewhere_check
from lyapunov_prune.checkpoints.reloading import GateCheck, reload_check
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import takes_model, wrap_text
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import PlainText
from lyapunov_prune.models.structure import in_eval_mode, model_name
from lyapunov_prune.results.files import RETRY, require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of
from lyapunov_prune.results.result import Result


@takes_model
def save(model: PlainText, tokenizer: PreTrainedTokenizerBase | None, target: str | Path) -> GateCheck:
    """Write `model`, changed in memory, to the folder `target`, with tokenizer, history and model card.

    The folder loads with plain transformers. Raises LyapunovPruneError for a model that cannot be written whole (with
    adapters, or quantised in memory), and as `write_model` does. `export.write_pruned` also runs the gate.
    """
    require_whole(model.model)
    name, steps = Path(model_name(model.model)).name, history_of(model.model).steps
    saw = {as_text(on.line()): None for step in steps for on in step.saw}
    about = [f"Made by: {', '.join(step.kind for step in steps)}." if steps else "Written as it was in memory."]
    if saw:
        about += ["", "The steps saw:", "", *(f"- {line}" for line in saw)]
    return write_model(model.model, tokenizer, target, {}, f"{name}, changed", "\n".join(about))


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    target: str | Path,
    results: Mapping[str, Result],
    title: str,
    about: str,
    remedy: str = RETRY,
) -> GateCheck:
    """Save model, tokenizer, `results` by file name, history and a model card to the folder `target`.

    `title` is plain text, `about` is Markdown with names escaped by `as_text`. Returns the check of the reloaded model.

    Raises CheckFailed if transformers would load another model from the files (for a compact model also without this
    package), and LyapunovPruneError, ending in `remedy`, if the target is not empty or cannot be written. Nothing is
    left there in either case.
    """
    require_empty(target)
    with whole_folder(target, remedy) as folder:
        save_files(model, tokenizer, folder)
        with torch.no_grad():
            decoder = wrap_text(model)
            inputs = sample_inputs(decoder, None)
            check = in_eval_mode(reload_check)(decoder, folder, inputs)
            if check.passed and is_compact(model):
                check = in_eval_mode(elsewhere_check)(model, folder, inputs)
        check.require_passed("the model does not reload as it was saved", "upgrade transformers, or take another model")
        history_of(model).save(folder / HISTORY)
        for name, result in results.items():
            result.save(folder / name)
        write_card(folder, title, about, model)
    return check
