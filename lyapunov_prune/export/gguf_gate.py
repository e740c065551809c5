"""The checks of a written .gguf file: it is the model, with the keys and bytes that it should have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lyapunov_prune.checkpoints.reloading import RELOADED, GateCheck, changed_setting
from lyapunov_prune.export.disk_gate import KEYS, PLACED
from lyapunov_prune.export.gguf_original import Original
from lyapunov_prune.forward.kept import KeptLogits
from lyapunov_prune.forward.logits import SAME_LIMIT, sample_inputs
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.gguf import read_gguf
from lyapunov_prune.models.gguf_copy import Anew, Piece, same_bytes
from lyapunov_prune.models.gguf_header import Header, Value


def file_reloads(made: Decoder, file: Path, within: float = 1e-12) -> GateCheck:
    """Whether `file`, read like any GGUF file, is the model `made`; float settings may differ by up to `within`."""
    model = made.model
    again = read_gguf(file, {"dtype": model.dtype, "device_map": str(model.device)})
    limit, wrong = SAME_LIMIT[model.dtype], changed_setting(made.layers, again.layers, within)
    if wrong:
        return GateCheck(RELOADED, False, float("inf"), limit, wrong)
    inputs = sample_inputs(again, None)  # the context in the file may be shorter
    worst = KeptLogits(again, inputs).deviation(KeptLogits(made, inputs))
    return GateCheck(RELOADED, worst <= limit, worst, limit, "logits of what is read from the file")


def keys_check(written: Header, values: Mapping[str, Value]) -> GateCheck:
    wrong = [key for key in values.keys() | written.values.keys() if written.values.get(key) != values.get(key)]
    detail = f"{min(wrong)} is not what was written" if wrong else f"{len(values)} keys, {written.layers} layers"
    return GateCheck(KEYS, not wrong, len(wrong), 0.0, detail)


def places_check(original: Original, written: Header, anew: Mapping[str, Anew]) -> GateCheck:
    """Whether every written tensor holds the bytes of its layer in the original, and none is missing."""
    was, kept = {tensor.name: tensor for tensor in original.header.tensors}, original.kept
    stay = {name for name, tensor in was.items() if tensor.layer is None or tensor.layer in kept}
    wrong, found = [], set()
    for tensor in written.tensors:
        name = tensor.name if tensor.layer is None else tensor.named_in(kept[tensor.layer])
        found.add(name)
        if name not in stay or not same_bytes(Piece(tensor.name, was[name], anew.get(tensor.name)), tensor):
            wrong.append(tensor.name)
    if wrong or found != stay:
        lacks = min(wrong or stay - found)
        return GateCheck(PLACED, False, len(wrong), 0.0, f"{lacks} does not hold the bytes of the original")
    went = 1 - sum(was[name].size for name in stay) / sum(tensor.size for tensor in was.values())
    detail = f"{len(stay) - len(anew)} tensors byte for byte, {len(anew)} written anew; {went:.0%} of all bytes removed"
    return GateCheck(PLACED, True, 0.0, 0.0, detail)
