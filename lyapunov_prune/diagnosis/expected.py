"""What the config of a checkpoint says its files hold, by the model that transformers builds of it without weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lyapunov_prune.diagnosis.packed import matrix_of
from lyapunov_prune.diagnosis.stored import Stored
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.folder import loading_errors, read_config
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.left_out import find_left_out
from lyapunov_prune.models.quantised_names import settings_of
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.models.weight_files import targets_of
from lyapunov_prune.models.wrappers import auto_class

_WIDEST = 2**20  # of a norm that is tried
_UNKNOWN = "Unrecognized configuration class"  # transformers, of one without a class that generates


@dataclass(frozen=True)
class Expected:
    """By the names in the files, with `.weight` for a packed matrix.

    `shapes` are those of the tensors that are filled as they are, without being joined or split on loading. `missing`
    are tensors of the model that nothing fills, `unread` those in the files that fill none and belong to no known part.
    `tied` are pairs of names that the config makes one tensor. `norms` says of every norm's weight w whether it is used
    as 1 + w. `failure` says why no model can be built.
    """

    shapes: Mapping[str, tuple[int, ...]]
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    norms: Mapping[str, bool] | None = None
    failure: str = ""


def expected_of(stored: Stored) -> Expected:
    """What the config of a folder says of its tensors; only names are compared."""
    assert stored.folder is not None
    names = {matrix_of(name) for name in stored.places}
    try:
        config = read_config(stored.folder)
        with loading_errors(stored.folder), quiet(), torch.device("meta"):
            for part, name, _ in settings_of(config):
                vars(part).pop(name)
            model: Any = auto_class(config).from_config(config)
        targets, others = targets_of(model, names)
    except LyapunovPruneError as error:
        unknown = _UNKNOWN in error.message  # a part of a model, which is no fault
        return Expected({}, failure="" if unknown else error.message.partition(";")[0])
    state = model.state_dict(keep_vars=True)
    filled = {target.name for target in targets.values()}
    held = {id(state[name]) for name in filled}
    missing, unread = tuple[str, ...](), tuple[str, ...]()
    with suppress(LyapunovPruneError):  # a kind of model that is not supported, which is no fault
        unread = find_left_out(model, find_structure(model), {}, others).strays
        missing = tuple(name for name, tensor in state.items() if id(tensor) not in held)
    keys: dict[int, list[str]] = {}
    for key, target in targets.items():
        keys.setdefault(id(state[target.name]), []).append(key)
    plain = {key: target.name for key, target in targets.items() if target.converter is None}
    own = {target: key for key, target in plain.items()}
    return Expected(
        shapes={key: tuple(state[name].shape) for key, name in plain.items()},
        missing=missing,
        unread=unread,
        tied=tuple(
            (some[0], other) for some in keys.values() for other in some[1:] if {some[0], other} <= plain.keys()
        ),
        norms={own[name]: shifted for name, shifted in _norms(model) if name in own},
    )


def _norms(model: Any) -> Iterable[tuple[str, bool]]:
    """The names of norms' weights, and whether they are used as 1 + w: whether a norm of zeros lets anything by."""
    known: dict[type, bool | None] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" not in type(module).__name__ or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
            continue
        if len(weight) > _WIDEST:  # a config that asks for more than any model has
            continue
        if type(module) not in known:
            known[type(module)] = None
            with suppress(Exception), torch.no_grad():  # some take more than one argument
                alone = copy.deepcopy(module).to_empty(device="cpu")
                for parameter in alone.parameters():
                    parameter.zero_()
                known[type(module)] = bool(
                    (alone(torch.linspace(-1, 1, len(weight)).expand(1, 1, -1)).abs() > 1e-3).any()
                )
        if (shifted := known[type(module)]) is not None:
            yield f"{name}.weight", shifted
