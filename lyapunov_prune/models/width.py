"""The setting that gives feed-forward blocks or experts their hidden channels, and a model with fewer of them.

Nothing is assumed about a family. A model of its class is built on the meta device with half of a setting, and what is
half as wide in it loses channels. `fused` tries on the block how a fused matrix comes apart.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.fused import REMEDY, attributes_of, taken_apart
from lyapunov_prune.models.plain import require_parameters, require_weights
from lyapunov_prune.models.rebuilt import built
from lyapunov_prune.models.sharing import shared_with
from lyapunov_prune.models.structure import in_eval_mode
from lyapunov_prune.models.units import Unit, Units, inside

# Settings for the number of hidden channels, those of experts first; one that is None is computed by the family.
SETTINGS = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_config.ffn_hidden_size",
    "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "dff", "shared_intermediate_size",
)  # fmt: skip
_AUTOMATIC = {"block_auto_adjust_ff_dim": False}  # without it LFM2 computes another width from the one given


@dataclass(frozen=True)
class WidthSetting:
    """The setting `name` of a config, or each number in it, is `times` the channels; `others` are changed with it."""

    name: str
    times: Fraction
    others: Mapping[str, Any] = field(default_factory=dict)

    def put(self, config: Any, width: int) -> None:
        *path, key = self.name.split(".")
        holder, number = reduce(getattr, path, config), int(self.times * width)
        old = getattr(holder, key)
        setattr(holder, key, [number] * len(old) if isinstance(old, list) else number)
        for name, value in self.others.items():
            setattr(config, name, value)


@dataclass(frozen=True)
class Width:
    """The units that `setting` gives their channels (layers × units); None for a unit of another setting.

    `width` is the number in a unit of the experts, or in a block if there are no experts. A unit with n times as many
    channels loses n times as many.
    """

    units: tuple[tuple[Unit | None, ...], ...]
    width: int
    setting: WidthSetting


# What was found, with the units that the model had then.
_FOUND: WeakKeyDictionary[PreTrainedModel, tuple[Units, Width]] = WeakKeyDictionary()


def find_width(decoder: Decoder) -> Width:
    """The units whose channels one setting of the config counts: those of the experts if there are any.

    Looked for once for every model, which may be streamed. Raises LyapunovPruneError, with the reason, for adapters and
    weights that are not parameters, if no matrices have names that are known, if layers share them, if no setting is
    their width or it gives something else its size too, and if their channels depend on each other.
    """
    require_weights(decoder.model, "unadapted")
    require_parameters(decoder.structure)
    units = decoder.units
    before, found = _FOUND.get(decoder.model, ((), None))
    if found is None or before != units:
        found = _width(decoder, units)
        _FOUND[decoder.model] = units, found
    return found


@in_eval_mode
def _width(decoder: Decoder, units: Units) -> Width:
    every = [unit for here in units for unit in here]
    first = next((unit for unit in every if unit.out.expert is not None), next(iter(every), None))
    half = first.width // 2 if first else 0
    found = _find_setting(decoder, first, half) if first else None
    why: str | None
    if first is None or found is None:
        why = (
            f"no layer of {type(decoder.structure.backbone).__name__} has matrices into and out of a feed-forward "
            "block by names that are known (state spaces have none)"
        )
        if first is not None:
            why = (
                f"no setting in the config of {decoder.structure.model_type} counts the {first.width} hidden channels "
                f"before {first.out.name.partition(':')[0]}: its class computes their number from others"
            )
        raise LyapunovPruneError(f"{why}; {REMEDY}")
    setting, after = found
    left = {unit: unit.out.weight(after).shape[1] for unit in every}
    loses = [unit for unit in every if left[unit] != unit.width]
    before = _built(decoder, None, 0)
    odd = next((unit for unit in loses if left[unit] * first.width != unit.width * half), None)
    why = _shared(decoder, loses) or _also_changed(before, after, setting, loses)
    if odd:
        why = f"with half of {setting.name}, {odd.out.name} has {left[odd]} of {odd.width} channels"
    if why:
        raise LyapunovPruneError(f"{why}; {REMEDY}")
    apart = taken_apart(decoder, loses, left, attributes_of(before, after))
    return Width(tuple(tuple(apart.get(unit) for unit in here) for here in units), first.width, setting)


def _find_setting(decoder: Decoder, unit: Unit, half: int) -> tuple[WidthSetting, PreTrainedModel] | None:
    """The setting that gives `unit` its width, if one does, and a model, on meta, in which the width is `half`."""
    config = decoder.structure.config
    others = {name: value for name, value in _AUTOMATIC.items() if getattr(config, name, value) != value}
    for name in SETTINGS:
        try:
            value = reduce(getattr, name.split("."), config)
        except AttributeError:
            continue
        numbers = set(value) if isinstance(value, list) else {value}
        number = numbers.pop()
        if numbers or not (number is None or (type(number) is int and number > 0)):
            continue
        times = Fraction(1) if number is None or others else Fraction(number, unit.width)
        setting = WidthSetting(name, times, others)
        after = _built(decoder, setting, half) if times * half % 1 == 0 else None
        if after is not None and unit.out.weight(after).shape[1] == half:
            return setting, after
    return None


def _built(decoder: Decoder, setting: WidthSetting | None, width: int) -> PreTrainedModel:
    """A model of the same class and settings, except for `setting`, on the meta device."""
    outer, config = copy.deepcopy((decoder.model.config, decoder.structure.config))
    if setting is not None:
        setting.put(config, width)
    return built(type(decoder.model), outer)


def _shared(decoder: Decoder, units: Sequence[Unit]) -> str | None:
    """Which layers share a unit's matrices, whose channels would leave all of them; None if none does."""
    shared = {layer: shared_with(decoder.layers, layer) for layer in {unit.layer for unit in units}}
    for unit in units:
        p, below = unit.out, f"{decoder.structure.layers_path}.{unit.layer}."
        other = shared[unit.layer].get(f"{inside(p.module, below)}.{p.parameter}")
        if other is not None and other < unit.layer:
            return (
                f"layers {other} and {unit.layer} share {p.name}, and its channels are ranked and its columns refitted "
                "by what one layer does with them"
            )
    return None


def _also_changed(
    before: PreTrainedModel, after: PreTrainedModel, setting: WidthSetting, units: Sequence[Unit]
) -> str | None:
    """Which parameter besides those of `units` changes its size with `setting`; None if none does."""
    none = torch.zeros(0, dtype=torch.long)
    own = {f"{e.module}.{e.key}" for unit in units for e, _ in unit.indices(none)}
    for name, parameter in before.named_parameters():
        if parameter.shape != after.get_parameter(name).shape and name not in own:
            return f"{setting.name} gives {name} its size too, which is no matrix into or out of the channels"
    return None
