"""Compare every tensor of a file with the dense model's, and tell what no honest storage explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from lyapunov_prune.diagnosis.compared import BLOCK, Compared, compare
from lyapunov_prune.diagnosis.faults import Case, Match, part_of
from lyapunov_prune.diagnosis.finding import Certainty, Finding
from lyapunov_prune.diagnosis.sides import Place, Sides, unnumbered
from lyapunov_prune.diagnosis.table import FAULTS, KNOWN

# An error of this size that nothing explains is told; a smaller one only of few tensors that are far from their peers.
_UNRELATED, _ODD, _FAR, _FEW = 0.5, 0.15, 3.0, 0.1
_HEAVY = 64  # tensors in which permutations and other tensors are sought
_HEAVY_TESTS = ("other_tensor", "permuted_rows", "permuted_columns")


@dataclass(frozen=True)
class _Told:
    """A tensor with its fault, before those that share it are told in one sentence."""

    place: Place
    where: str
    kind: str
    phrase: str
    certainty: Certainty
    error: float
    source: tuple[str, int | None] | None = None
    group: tuple[str, ...] = ()


def faults_of_tensors(sides: Sides) -> list[Finding]:
    """What is wrong with the tensors of the file, from one pass over both models; none for an honest file."""
    places = {place: compare(*sides.pair(place)) for place in _untied(sides)}
    told: list[_Told] = []
    searched = 0
    usual = _usual(places)
    for place, found in places.items():
        if found.bad:
            told.append(
                _Told(place, "", "non-finite", f"{{holds}} {found.bad:,} numbers that are not finite", "certain", 1)
            )
            continue
        for case in _cases(sides, place, found):
            heavy = searched < _HEAVY and (
                found.cosine < 0.9 or not case.whole or found.excess > max(1.0, _FAR * usual[place])
            )
            match = next(
                filter(None, (test(case) for test in FAULTS if heavy or test.__name__ not in _HEAVY_TESTS)), None
            )
            searched += heavy
            if match is not None:
                told.append(_matched(sides, case, match))
            elif _odd(case, usual[place]):
                told.append(
                    _Told(
                        place,
                        _where(case),
                        "differs",
                        "{differs} from DENSE by far more than its type explains"
                        f" (relative error {case.error:.2g}, storage explains {found.stored:.2g})",
                        "likely",
                        case.error,
                    )
                )
    few = max(2, _FEW * len(places))
    if sum(each.kind == "differs" and each.error < _UNRELATED for each in told) > few:  # a part was trained on
        told = [each for each in told if each.kind != "differs" or each.error >= _UNRELATED]
    return [*_grouped(sides, told)]


def _untied(sides: Sides) -> Iterator[Place]:
    """The tensors of the file, one for all that are tied in both models."""
    mine, theirs = (side.model.state_dict(keep_vars=True) for side in (sides.dense, sides.file))
    seen: set[tuple[int, int, int | None]] = set()
    for place in sides.places:
        key = id(mine[sides.dense_name(place)]), id(theirs[place.name]), place.expert
        if key not in seen:
            seen.add(key)
            yield place


def _usual(places: dict[Place, Compared]) -> dict[Place, float]:
    """The median error of the peers of each tensor, in units of what storage explains."""
    groups: dict[tuple[str, int], list[float]] = {}
    for place, found in places.items():
        groups.setdefault((place.role, min(2, len(found.shape))), []).append(found.excess)
    whole = {rank: [f.excess for f in places.values() if min(2, len(f.shape)) == rank] for rank in (1, 2)}
    found_of = {key: float(np.median(peers if len(peers) > 3 else whole[key[1]])) for key, peers in groups.items()}
    return {place: found_of[place.role, min(2, len(found.shape))] for place, found in places.items()}


def _cases(sides: Sides, place: Place, found: Compared) -> Iterator[Case]:
    """The part of the matrix that is off: the smallest outside of which it is honest, or all of it."""
    fitting = [part for part in found.parts() if 0 < part[0] < 0.75 and part[1] <= found.allowed]
    if not fitting and found.excess <= 1:
        return
    W, V = (tensor.reshape(len(tensor), -1) for tensor in sides.pair(place))
    chosen: dict[str, np.ndarray | None] = {"rows": None, "columns": None, "blocks": None}
    if fitting:
        chosen |= min(fitting, key=lambda part: part[0])[2]
    yield Case(sides, place, found, part_of(W, **chosen), part_of(V, **chosen), **chosen)


def _odd(case: Case, usual: float) -> bool:
    """Whether an error that no fault explains is told: a matrix that is unrelated, or one far from its peers."""
    found = case.found
    if case.whole:
        if found.cosine < 0.5:
            return True
        far = found.error > _ODD and found.excess > max(1.0, _FAR * usual)
        return far and abs(found.projected) > 0.1  # zero for a projection, such as pruning or low rank
    usual_error = float(np.median(found.rows if case.columns is None else found.columns))
    return case.error > max(_UNRELATED, 5 * usual_error)


def _matched(sides: Sides, case: Case, match: Match) -> _Told:
    certainty: Certainty = (
        "certain" if match.left < 0.3 * case.error or match.kind in ("constant", "zero") else "likely"
    )
    phrase = match.phrase
    if match.source is not None:
        name, expert = match.source
        phrase = f"{{is}} `{name}`{'' if expert is None else f' of expert {expert}'} of DENSE"
    return _Told(case.place, _where(case), match.kind, phrase, certainty, case.error, match.source)


def _where(case: Case) -> str:
    if case.blocks is not None:
        row, block = case.blocks[0]
        first = f"numbers {block * BLOCK}–{block * BLOCK + BLOCK - 1} of row {row}"
        return first if len(case.blocks) == 1 else f"{len(case.blocks)} blocks of {BLOCK} numbers, the first {first}"
    for what, numbers in ("row", case.rows), ("column", case.columns):
        if numbers is not None:
            return f"{what}{'s' if len(numbers) > 1 else ''} {ranges(numbers.tolist())}"
    return ""


def ranges(numbers: Sequence[int], most: int = 4) -> str:
    """Numbers as ranges: `3, 5–7`; those beyond the first four are counted."""
    numbers = sorted(set(numbers))
    breaks = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1), len(numbers)]
    parts = [numbers[a:b] for a, b in pairwise(breaks)]
    told = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts[:most])
    return told + (f" and {len(parts) - most} more places" if len(parts) > most else "")


def _grouped(sides: Sides, told: Sequence[_Told]) -> Iterator[Finding]:
    """One finding for all tensors that share a fault."""
    told = _moved(sides, told)
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[_Told]] = {}
    for each in told:
        phrase = "" if each.kind == "differs" else each.phrase
        groups.setdefault((each.kind, phrase, each.where, each.group), []).append(each)
    for (kind, _, where, _), members in sorted(groups.items(), key=lambda item: -sum(each.error for each in item[1])):
        names = tuple(dict.fromkeys(sides.told(each.place) for each in members))
        phrase = max(members, key=lambda each: each.error).phrase
        subject = f"{where[:1].upper()}{where[1:]} of {_named(sides, members)}" if where else _named(sides, members)
        cause, remedy = KNOWN[kind]
        sure: Certainty = "certain" if all(each.certainty == "certain" for each in members) else "likely"
        several = (
            (not where and len(names) > 1) or where.startswith(("rows", "columns", "numbers")) or "blocks" in where
        )
        yield Finding(kind, names, f"{subject} {_conjugated(phrase, several=several)}.", sure, cause, remedy)


_PLURAL = {"is": "are", "has": "have", "holds": "hold", "differs": "differ"}


def _conjugated(phrase: str, *, several: bool) -> str:
    return phrase.format(**{verb: plural if several else verb for verb, plural in _PLURAL.items()})


def _moved(sides: Sides, told: Sequence[_Told]) -> list[_Told]:
    """What tensors that are others of the dense model have in common: exchanged, of the next layer, the embedding."""
    own = {(sides.dense_name(each.place), each.place.expert): each for each in told}
    embedding = sides.dense.model.get_input_embeddings()
    names = {id(module): name for name, module in sides.dense.model.named_modules()}
    head = f"{names.get(id(sides.dense.model.get_output_embeddings()))}.weight"
    result = []
    for each in told:
        if each.source is None or each.where:
            result.append(each)
            continue
        name, expert = each.source
        other = own.get(each.source)
        back = other is not None and other.source == (sides.dense_name(each.place), each.place.expert)
        layer, mine = sides.dense.structure.layer_of(name), each.place.own
        same_role = unnumbered(name) == unnumbered(sides.dense_name(each.place))
        if sides.dense_name(each.place) == head and name == f"{names[id(embedding)]}.weight":
            each = replace(each, kind="head", phrase="{is} the embedding; DENSE has a head of its own")
        elif back and same_role and layer != mine and layer is not None and mine is not None:
            a, b = sorted((layer, mine))
            each = replace(each, kind="exchanged", phrase=f"{{is}} exchanged between layers {a} and {b}")
        elif back and same_role and expert is not None and each.place.expert is not None:
            a, b = sorted((expert, each.place.expert))
            phrase = f"{{is}} exchanged between experts {a} and {b}"
            each = replace(each, kind="exchanged", phrase=phrase, group=(str(mine),))
        elif back:
            group = tuple(sorted((unnumbered(name), unnumbered(each.place.name))))
            each = replace(each, kind="exchanged", phrase="{is} exchanged", group=group)
        elif same_role and layer is not None and mine is not None and layer != mine:
            which = f"{layer - mine:+d}".replace("-", "−")
            each = replace(
                each,
                kind="offset",
                phrase=f"{{is}} off by {abs(layer - mine)} layer"
                f"{'s' * (abs(layer - mine) > 1)}: layer i of FILE holds layer i {which[0]} {which[1:]} of DENSE",
            )
        result.append(each)
    return result


def _named(sides: Sides, members: Sequence[_Told]) -> str:
    """The tensors in a sentence: those of one role in several layers as one name with a range of numbers."""
    roles: dict[str, list[_Told]] = {}
    for each in members:
        roles.setdefault(each.place.role, []).append(each)
    parts = []
    for some in roles.values():
        name = sides.told(some[0].place)
        layers = [each.place.layer for each in some if each.place.layer is not None]
        experts = sorted({each.place.expert for each in some if each.place.expert is not None})
        if len(set(layers)) > 1:
            name = name.replace(f".{layers[0]}.", f".{ranges(layers)}.", 1)
        of = f" of expert{'s' * (len(experts) > 1)} {ranges(experts)}" if experts else ""
        parts.append(f"`{name}`{of}")
    if len(parts) > 4:
        return f"{', '.join(parts[:3])} and {len(parts) - 3} more"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def diagnosed(sides: Sides) -> list[Finding]:
    with torch.no_grad():
        return faults_of_tensors(sides)
