"""The base class of criteria: a criterion measures a model and ranks its layers for removal. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.lazy import np
from lyapunov_prune.linalg import require_numbers
from lyapunov_prune.ranking.counts import free_layers, protected_layers
from lyapunov_prune.registry import Choice

if TYPE_CHECKING:
    from lyapunov_prune.forward.reading import Reading
    from lyapunov_prune.profiles.contraction_profile import ContractionProfile
    from lyapunov_prune.profiles.expert_use import ExpertUse
    from lyapunov_prune.profiles.influence import InfluenceProfile
    from lyapunov_prune.ranking.ranking import LayerRanking, Ranking
    from lyapunov_prune.results.result import MeasuredOn, ModelIdentity, Result

EVERYWHERE = ("layers", "attention")
_AGAIN = "measure again in float32"
_REMEDIES = {"rho": "a contraction profile; measure one", "bi": "Block Influence; measure it"}


@dataclass(frozen=True, eq=False)
class RankingRequest:
    """What a criterion is asked: the model, the text, `what` of its layers to rank, and how it may measure.

    Measurements are saved in `folder`; a search keeps its unfinished work in `jobs`.
    """

    reading: Reading
    what: str
    remove: int | None
    protect: tuple[int, ...]
    batch_size: int
    folder: Path | None
    jobs: Path | None

    def keep(self, name: str, measured: Result) -> None:
        """Save a measurement as `name.json`, if there is a folder."""
        if self.folder is not None:
            measured.save(self.folder / f"{name}.json")


class Criterion(Choice):
    """An order of layers for removal. Each criterion is a subclass in a file of its own and a row in `table.CRITERIA`.

    `parts` are what it can rank: whole layers, their attention, the experts of each. `streamed` are the parts
    that it can rank in a model which is read one layer at a time. `profiled` says whether a saved LayerProfile holds
    all that it needs. `chooses` says in words how it chooses a
    number of layers together; it is empty if layers have scores, which give an order.
    """

    parts: ClassVar[tuple[str, ...]] = ("layers",)
    streamed: ClassVar[tuple[str, ...]] = ()
    profiled: ClassVar[bool] = False
    chooses: ClassVar[str] = ""

    @abstractmethod
    def rank(self, asked: RankingRequest) -> Ranking:
        """Measure, rank, and save what was measured."""


class Together(Criterion):
    """A criterion that chooses layers together; its ranking is saved under its name."""

    def rank(self, asked: RankingRequest) -> Ranking:
        ranking = self.chosen(asked)
        asked.keep(self.name, ranking)
        return ranking

    @abstractmethod
    def chosen(self, asked: RankingRequest) -> Ranking:
        """The ranking; `asked.remove` is the number of layers."""


class Scored(Criterion):
    """A criterion that scores every layer from the values that it `needs`; the smallest is removed first."""

    needs: ClassVar[tuple[str, ...]]

    def score(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The scores from the values of the layers that may be removed: arrays whose last axis is the layers.

        By default the value that the criterion needs.
        """
        return values[self.needs[0]]

    def by_position(self, layer: np.ndarray) -> dict[str, np.ndarray]:
        """Values that need no measurement; `layer` (L,) holds indices, NaN if a layer lacks the part."""
        return {"layer": layer}

    def ranking(
        self,
        values: Mapping[str, np.ndarray],
        model: ModelIdentity,
        measured_on: tuple[MeasuredOn, ...] = (),
        *,
        what: str = "layers",
        protect: Sequence[int] = (),
        drawn: Mapping[str, np.ndarray | None] | None = None,
    ) -> LayerRanking:
        """Rank by `values`: by name one value a layer, NaN for a layer that lacks `what`.

        Layers of `protect` (counted from the end if negative) stay, and the scores of others ignore them. `drawn` holds
        the values of bootstrap draws of the windows, (draws, L); if it has all that the score needs, `picked` is set.
        Raises LyapunovPruneError if a score is not finite.
        """
        from lyapunov_prune.ranking.ranking import LayerRanking
        from lyapunov_prune.ranking.stability import picked

        layers = model.num_layers
        free = list(free_layers(layers, protect))
        values = self.by_position(np.arange(layers, dtype=np.float64)) | dict(values)
        scores = np.full(layers, np.nan)
        scores[free] = self.score({name: value[free] for name, value in values.items()})
        often = None
        needed = {name: value for name in self.needs if (value := (drawn or {}).get(name)) is not None}
        if needed and len(needed) == len(self.needs):
            draws = np.full((len(next(iter(needed.values()))), layers), np.nan)
            draws[:, free] = self.score({name: value[:, free] for name, value in needed.items()})
            often = picked(draws)
        needed_at = np.isin(np.arange(layers), free) if what == "layers" else ~np.isnan(scores)
        require_numbers(np.where(needed_at, scores, 0), f"scores of {what}", _AGAIN)
        return LayerRanking(
            criterion=self.name,
            alpha=getattr(self, "alpha", None),
            scores=scores,
            model=model,
            measured_on=measured_on,
            what=what,
            protected=protected_layers(layers, protect),
            picked=often,
        )

    def of_profiles(
        self, profile: ContractionProfile | None, influence: InfluenceProfile | None, protect: Sequence[int] = ()
    ) -> LayerRanking:
        """Rank whole layers by earlier measurements, both of one model. Raises as `measured.rank_layers`."""
        source = profile or influence
        values: dict[str, np.ndarray] = {}
        drawn: dict[str, np.ndarray | None] = {}
        used: list[MeasuredOn] = []
        below_floor: tuple[int, ...] = ()
        if "rho" in self.needs and profile is not None:
            require_numbers(profile.rho, "rho of layers", _AGAIN)
            profile.require_above_floor()
            below_floor = profile.below_floor
            values["rho"], drawn["rho"] = profile.rho, profile.drawn()
            used.append(profile.measured_on)
        if "bi" in self.needs and influence is not None:
            values["bi"], drawn["bi"] = influence.influence, influence.drawn()
            used.append(influence.measured_on)
        missing = [remedy for name, remedy in _REMEDIES.items() if name in self.needs and name not in values]
        if source is None or missing:
            needed = missing[0] if missing else "a contraction profile or a Block Influence"
            raise LyapunovPruneError(f"criterion {self.name} needs {needed}")
        ranking = self.ranking(values, source.measured_on.model, tuple(used), protect=protect, drawn=drawn)
        return replace(ranking, below_floor=below_floor)


class OfExperts(Criterion):
    """A criterion for the experts of every layer, by the router's use of them, which one forward measures."""

    parts = ("experts",)
    streamed = ("experts",)

    @abstractmethod
    def score(self, use: ExpertUse) -> np.ndarray:
        """A score for every expert (L, E); the smallest of a layer is removed first."""

    def rank(self, asked: RankingRequest) -> Ranking:
        from lyapunov_prune.ranking.experts import rank_experts

        ranking = rank_experts(asked.reading, self.name, self.score, asked.batch_size)
        asked.keep("expert-use", ranking.use)
        return ranking


class ByPosition(Scored):
    """A control: it measures nothing but which layers have the part."""

    parts = EVERYWHERE
    streamed = EVERYWHERE
    profiled = True

    def rank(self, asked: RankingRequest) -> LayerRanking:
        decoder, layers = asked.reading.decoder, asked.reading.structure.num_layers
        layer = np.arange(layers, dtype=np.float64)
        if asked.what != "layers":
            anatomy = asked.reading.anatomy
            layer[[asked.what not in anatomy[i].parts for i in range(layers)]] = np.nan
        return self.ranking(self.by_position(layer), decoder.identity, what=asked.what, protect=asked.protect)


class ByProfile(Scored):
    """A criterion that uses a LayerProfile, measured with one perturbation for each of its `seeds`.

    Raises LyapunovPruneError, after one window, for a dtype in which every ρ is rounding.
    """

    seeds: tuple[int, ...] = (0, 1, 2, 3)

    streamed = ("layers",)
    profiled = True

    def rank(self, asked: RankingRequest) -> LayerRanking:
        from lyapunov_prune.profiles.contraction import require_above_rounding
        from lyapunov_prune.profiles.profile import HOW, LayerProfile, profile_layers
        from lyapunov_prune.results.store import once

        reading, how = asked.reading, {**HOW, "seeds": self.seeds}

        def measure() -> LayerProfile:
            require_above_rounding(reading)
            profile = profile_layers(reading.decoder, reading, **how, batch_size=asked.batch_size)
            self.of_profiles(profile.contraction, profile.influence, asked.protect)  # raises
            return profile

        if asked.folder is None:
            profile = measure()
        else:
            path = asked.folder / "profile.json"  # the command `profile` writes there too
            origin = reading.measured_on()
            profile = once(path, LayerProfile, origin, how, measure, shared=True)
        return self.of_profiles(profile.contraction, profile.influence, asked.protect)
