"""Write a model as a plain transformers checkpoint: one changed in memory, or a streamed one layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.cards import as_text, write_card
from lyapunov_prune.checkpoints.outline import Outline, read_outline
from lyapunov_prune.checkpoints.reloading import (
    RELOADED,
    GateCheck,
    changed_setting,
    elsewhere_check,
    reload_check,
    wrong_packed_keys,
)
from lyapunov_prune.checkpoints.tensor_files import write_index
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.logits import sample_inputs
from lyapunov_prune.models.compact import is_compact
from lyapunov_prune.models.decoder import Decoder, takes_model, wrap_any
from lyapunov_prune.models.digest import combined, saved_tensors, tensor_digests
from lyapunov_prune.models.left_out import require_whole
from lyapunov_prune.models.plain import Plain
from lyapunov_prune.models.structure import in_eval_mode, model_name
from lyapunov_prune.results.files import RETRY, require_empty, whole_folder
from lyapunov_prune.results.history import HISTORY, history_of
from lyapunov_prune.results.result import Result
from lyapunov_prune.results.worth import Worth


@takes_model
def save(model: Plain, tokenizer: PreTrainedTokenizerBase | None, target: str | Path) -> GateCheck:
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
    worth: Worth | None = None,
) -> GateCheck:
    """Save model, tokenizer, `results` by file name, history and a model card to the folder `target`.

    `title` is plain text, `about` is Markdown with names escaped by `as_text`, `worth` is for the card. Returns the
    check of the reloaded model.

    Raises CheckFailed if transformers would load another model from the files (for a compact model also without this
    package), and LyapunovPruneError, ending in `remedy`, if the target is not empty or cannot be written. Nothing is
    left there in either case.
    """
    require_empty(target)
    with whole_folder(target, remedy) as folder:
        save_files(model, tokenizer, folder)
        with torch.no_grad():
            decoder = wrap_any(model)
            inputs = sample_inputs(decoder, None)
            check = in_eval_mode(reload_check)(decoder, folder, inputs)
            if check.passed and is_compact(model):
                check = in_eval_mode(elsewhere_check)(model, folder, inputs)
        check.require_passed("the model does not reload as it was saved", "upgrade transformers, or take another model")
        history_of(model).save(folder / HISTORY)
        for name, result in results.items():
            result.save(folder / name)
        write_card(folder, title, about, model, worth=worth)
    return check


# Turns a layer's tensors, by their names in the model, into those that its file holds.
StoredAs = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Shards:
    """The files of a model in `folder`. Tensors outside the layers, configs and tokenizer are written on creation."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
        model = decoder.model
        self._model, self._folder, self._structure = model, folder, decoder.structure
        self._names: dict[int | None, list[str]] = {}
        for name, _ in saved_tensors(model):  # a shared tensor under one name
            self._names.setdefault(self._structure.layer_of(name), []).append(name)
        self._where: dict[str, str] = {}
        self._size = 0
        self._digests: dict[str, dict[str, str]] = {}
        save_files(model, tokenizer, folder, {})
        self.write(None)

    def write(self, layer: int | None, stored_as: StoredAs | None = None) -> None:
        """Write the current tensors of `layer`, under the names that transformers uses in files.

        With `stored_as`, the file holds what it returns, and transformers must be able to convert that back.
        """
        state = self._model.state_dict()
        tensors = {name: state[name] for name in self._names.get(layer, [])}
        self._digests |= {name: tensor_digests(tensor) for name, tensor in tensors.items()}
        reverted = revert_weight_conversion(self._model, stored_as(tensors) if stored_as else tensors)
        stored = {key: t.cpu().contiguous() for key, t in reverted.items()}
        number, files = 1 if layer is None else layer + 2, self._structure.num_layers + 1
        file = f"model-{number:05}-of-{files:05}.safetensors"
        save_file(stored, self._folder / file, {"format": "pt"})
        self._where |= dict.fromkeys(stored, file)
        self._size += sum(tensor.nbytes for tensor in stored.values())

    def finish(self) -> Outline:
        """Write the index, and compare what transformers finds in the files with what was written, bit for bit.

        Returns what was found. Raises CheckFailed if a layer was not written, or if weights or settings would change
        on reloading.
        """
        write_index(self._folder, self._where, self._size)
        wrong: str | None
        try:
            found = read_outline(self._folder, self._folder)
        except LyapunovPruneError as error:
            wrong = str(error).replace(str(self._folder), "what was written").rpartition(";")[0]
        else:
            wrong = changed_setting(self._structure.layers, found.decoder.structure.layers) or wrong_packed_keys(
                self._folder, found.model.config
            )
            if found.identity.weights != combined(self._digests):
                wrong = "the files hold other weights than were written"
        told = wrong or "names, settings and every bit of what is read again"
        check = GateCheck(RELOADED, not wrong, 0.0, 0.0, told)
        check.require_passed("the checkpoint, read again, is not the model", "take the model in memory")
        return found
