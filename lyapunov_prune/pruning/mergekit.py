"""Read a mergekit file of slices, as PruneMe writes it, as a plan: it removes the layers that no slice holds."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lyapunov_prune.errors import LyapunovPruneError, first_line, printable
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.results.files import require_file
from lyapunov_prune.results.result import ModelIdentity

SUFFIXES = (".yaml", ".yml")
_CHANGES = ("parameters", "residual_weight")  # keys that scale weights


@dataclass(frozen=True)
class MergekitSlices:
    """The layers that a mergekit file keeps: `ranges` of the first layer and one past the last, in order.

    `model` is the file's name of the model. The file has no fingerprint, so only the number of layers can tell whether
    it belongs to the model at hand.
    """

    path: str
    model: str
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def load(cls, path: str | Path) -> MergekitSlices:
        """Read a mergekit file.

        Raises LyapunovPruneError if the file is no mergekit file, merges several models, scales weights, or takes
        layers twice or out of order.
        """
        content = _content(Path(path))
        found = list(_sources(path, content))
        models = list(dict.fromkeys(model for model, _ in found))
        if len(models) > 1:
            raise LyapunovPruneError(
                f"{path} takes layers of {models[0]} and of {models[1]}; a plan removes layers of one model"
            )
        for (first, end), (after, last) in pairwise(layers for _, layers in found):
            if after < end:
                twice = f"layer {max(first, after)} twice" if last > first else f"layer {after} behind layer {end - 1}"
                raise LyapunovPruneError(
                    f"{path} takes {twice}; a plan removes layers and keeps the order of the others"
                )
        return cls(str(path), models[0], tuple(layers for _, layers in found))

    def require_model(self, identity: ModelIdentity) -> None:
        """Raise LyapunovPruneError unless the last slice ends with the last layer of this model."""
        layers = identity.num_layers
        if self.ranges[-1][1] != layers:
            raise LyapunovPruneError(
                f"the slices of {self.path} end with layer {self.ranges[-1][1] - 1} and the model's last layer is "
                f"{layers - 1}; give the model that they were made for, or name the layers to remove: --layers"
            )

    def plan(self, identity: ModelIdentity) -> PruningPlan:
        """The plan for this model. Raises as `require_model`, and LyapunovPruneError if no layer is removed."""
        self.require_model(identity)
        kept = {layer for first, end in self.ranges for layer in range(first, end)}
        return PruningPlan.given(identity, [layer for layer in range(self.ranges[-1][1]) if layer not in kept])


def read_plan(path: Path) -> PruningPlan | MergekitSlices:
    """Read a plan.json or, by its suffix, a mergekit file."""
    return MergekitSlices.load(path) if path.suffix.lower() in SUFFIXES else PruningPlan.load(path)


def _content(path: Path) -> dict[str, Any]:
    try:
        require_file(path)
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise LyapunovPruneError(f"cannot read {path}: {error.strerror}; give a plan.json or a mergekit file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LyapunovPruneError(f"{path} is not YAML ({first_line(error)}); give a mergekit file of slices") from None
    if not isinstance(content, dict) or not isinstance(content.get("slices"), list) or not content["slices"]:
        raise LyapunovPruneError(f"{path} has no slices; give a mergekit file of slices with their layer_range")
    if content.get("merge_method") != "passthrough":
        raise LyapunovPruneError(
            f"{path} merges by {_shown(content.get('merge_method'))}; a plan needs the method passthrough"
        )
    _require_unscaled(path, content)
    return content


def _sources(path: str | Path, content: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    for number, piece in enumerate(content["slices"]):
        sources = piece.get("sources") if isinstance(piece, dict) else None
        if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], dict):
            raise LyapunovPruneError(
                f"slice {number} of {path} needs exactly one source; give one model and its layer_range"
            )
        source = sources[0]
        _require_unscaled(path, piece)
        _require_unscaled(path, source)
        match source.get("layer_range"):
            case [int(first), int(end)] if 0 <= first < end:
                yield _shown(source.get("model")), (first, end)
            case layers:
                raise LyapunovPruneError(
                    f"slice {number} of {path} has layer_range {_shown(layers)}; give the first layer and one past the "
                    "last, as [0, 21]"
                )


def _require_unscaled(path: str | Path, part: dict[str, Any]) -> None:
    for name in _CHANGES:
        if part.get(name) is not None:
            raise LyapunovPruneError(f"{path} changes weights by {name}; a plan removes layers only, leave it out")


def _shown(value: object) -> str:
    """A name as it is; anything else shortened, because YAML aliases can repeat a list without end."""
    return printable(value if isinstance(value, str) else reprlib.repr(value))
