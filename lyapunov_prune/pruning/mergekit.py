"""Read a mergekit file of slices, as PruneMe writes it, as a plan: it removes the layers that no slice holds."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lyapunov_prune.errors import LyapunovPruneError, printable, reported
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
        failures = OSError, yaml.YAMLError, ValueError, RecursionError
        with reported(f"cannot read {path} as YAML", "give a plan.json or a mergekit file of slices", *failures):
            require_file(path)
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        if fault := next(_faults(content), ""):
            raise LyapunovPruneError(f"{path}: {fault}")
        sources = [piece["sources"][0] for piece in content["slices"]]
        ranges = tuple((first, end) for first, end in (source["layer_range"] for source in sources))
        return cls(str(path), _shown(sources[0].get("model")), ranges)

    def require_model(self, identity: ModelIdentity) -> None:
        """Raise LyapunovPruneError unless the last slice ends with the last layer of this model."""
        layers = identity.num_layers
        if self.ranges[-1][1] != layers:
            raise LyapunovPruneError(
                f"the slices of {self.path} end with layer {self.ranges[-1][1] - 1}, the model with {layers - 1}; give "
                "the model that they were made for, or name the layers to remove (--layers)"
            )

    def plan(self, identity: ModelIdentity) -> PruningPlan:
        """The plan for this model. Raises as `require_model`, and LyapunovPruneError if no layer is removed."""
        self.require_model(identity)
        kept = {layer for first, end in self.ranges for layer in range(first, end)}
        return PruningPlan.given(identity, [layer for layer in range(self.ranges[-1][1]) if layer not in kept])


def read_plan(path: Path) -> PruningPlan | MergekitSlices:
    """Read a plan.json or, by its suffix, a mergekit file."""
    return MergekitSlices.load(path) if path.suffix.lower() in SUFFIXES else PruningPlan.load(path)


def _faults(content: Any) -> Iterator[str]:
    """Why the content of a file is not the removal of layers of one model; only the first fault is sure."""
    slices = content.get("slices") if isinstance(content, dict) else None
    if not isinstance(slices, list) or not slices:
        yield "it has no slices; give a mergekit file of slices with their layer_range"
        return
    if content.get("merge_method") != "passthrough":
        yield f"it merges by {_shown(content.get('merge_method'))}; a plan needs the method passthrough"
    yield from _scaled(content)
    before: dict[str, Any] | None = None
    for number, piece in enumerate(slices):
        sources = piece.get("sources") if isinstance(piece, dict) else None
        if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], dict):
            yield f"slice {number} needs exactly one source; give one model and its layer_range"
            return
        yield from _scaled(piece)
        yield from _scaled(sources[0])
        yield from _misplaced(number, sources[0], before)
        before = sources[0]


def _misplaced(number: int, source: dict[str, Any], before: dict[str, Any] | None) -> Iterator[str]:
    match source.get("layer_range"):
        case [int(first), int(end)] if 0 <= first < end:
            pass
        case layers:
            yield (
                f"slice {number} has layer_range {_shown(layers)}; give the first layer and one past the last, as "
                "[0, 21]"
            )
            return
    if before is None:
        return
    models = _shown(before.get("model")), _shown(source.get("model"))
    if models[0] != models[1]:
        yield f"it takes layers of {models[0]} and of {models[1]}; a plan removes layers of one model"
    start, stop = before["layer_range"]
    if first < stop:
        twice = f"layer {max(start, first)} twice" if end > start else f"layer {first} behind layer {stop - 1}"
        yield f"it takes {twice}; a plan removes layers and keeps the order of the others"


def _scaled(part: dict[str, Any]) -> Iterator[str]:
    for name in _CHANGES:
        if part.get(name) is not None:
            yield f"it changes weights by {name}; a plan removes layers only, leave it out"


def _shown(value: object) -> str:
    """A name as it is; anything else shortened, because YAML aliases can repeat a list without end."""
    return printable(value if isinstance(value, str) else reprlib.repr(value))
