"""Compare every tensor of a file with the dense model's, and tell what no honest storage explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lyapunov_prune.diagnosis.compared import BLOCK, FLOOR, Compared, compare
from lyapunov_prune.diagnosis.faults import Case, Match, part_of
from lyapunov_prune.diagnosis.finding import Certainty, Diagnosis, Finding, unnumbered
from lyapunov_prune.diagnosis.known import FAULTS, HEAVY, KNOWN
from lyapunov_prune.diagnosis.settings import LATER, changed_settings, missing_biases, tokenizer_faults, with_setting
from lyapunov_prune.diagnosis.shares import Restored
from lyapunov_prune.diagnosis.sides import Sides, TensorPlace
from lyapunov_prune.forward.reading import Readable, Reading, read
from lyapunov_prune.models.decoder import Streamable, runs_models
from lyapunov_prune.models.structure import model_name, require_versions
from lyapunov_prune.results.wording import runs

# An error of this size that nothing explains is told; a smaller one only of few tensors that are far from their peers.
_UNRELATED, _ODD, _FAR, _FEW = 0.5, 0.15, 3.0, 0.1
_HALF, _WHOLE = 0.4, 0.8  # errors that are told though the peers are as far off, and all matrices
_LARGE, _ANY = 1.3, 0.9  # mean square of what was pruned, by that of all: of the large numbers, of any
_RESTORED = 6  # findings that are put right one at a time
# What a model in another form is made of; another order alone changes no rounding.
_ORDER = ("permuted",)
_FORMS = (_ORDER, ("constant", "scale", "rotated", "differs"))
_SEARCHED = 64  # tensors on which the tests of `HEAVY` are tried


@dataclass(frozen=True)
class _Told:
    """A tensor with its fault, before those that share it are told in one sentence."""

    place: TensorPlace
    where: str
    kind: str
    phrase: str
    certainty: Certainty
    error: float
    source: tuple[str, int | None] | None = None
    group: tuple[str, ...] = ()


@runs_models
def diagnose(
    dense: Streamable, file: Streamable, batch: Readable | None = None, *, kept: Sequence[int] | None = None
) -> Diagnosis:
    """What is broken in `file`, a model made from `dense`: every fault that no honest storage or training explains.

    `kept` holds the dense model's number of each layer of `file`; None says that none was removed. Both models are read
    once, and those tensors again that are off by more than the file's own rounding. With a `batch`, what each of the
    first findings explains is measured on two windows of it; for streamed models it is not.

    Raises LyapunovPruneError for two models that are no versions of one.
    """
    require_versions(dense.structure, file.structure)
    sides = Sides(dense, file, tuple(range(file.structure.num_layers)) if kept is None else tuple(kept))
    compared = {place: compare(*sides.pair(place)) for place in sides.by_layer(sides.untied())}
    told = _faults(sides, compared)
    found = [*_grouped(sides, told), *((finding, ()) for finding in missing_biases(sides))]
    settings = changed_settings(sides)
    if batch is None or dense.stream is not None or dense.packed or file.packed:
        found += [(_setting(said, None), ()) for said in settings.values()]
    else:
        found = _measured(sides, read(dense, batch), compared, found, settings)
    size = dense.structure.config.vocab_size
    findings = [finding for finding, _ in found] + [*tokenizer_faults(sides, size)]
    return Diagnosis(model_name(file.model), tuple(findings), *_storage(sides, compared))


def _measured(
    sides: Sides,
    reading: Reading,
    compared: dict[TensorPlace, Compared],
    found: Sequence[tuple[Finding, tuple[TensorPlace, ...]]],
    settings: dict[str, str],
) -> list[tuple[Finding, tuple[TensorPlace, ...]]]:
    """The findings with the share of the error that each explains, the largest first, and the settings that matter.

    Changes that make up for each other are no faults: neurons in another order, scales that moved from a norm into the
    next matrices, rotations.
    """
    if not found and not settings:
        return []
    restored = Restored(sides, reading, compared)
    for kinds in _FORMS:
        changes = [places for finding, places in found if finding.kind in kinds]
        if changes and restored.made_up_for(changes, exact=kinds == _ORDER):
            found = [each for each in found if each[0].kind not in kinds]
    result: list[tuple[Finding, tuple[TensorPlace, ...]]] = []
    for finding, places in found[:_RESTORED]:
        share = restored.share(restored.kl_right(places)) if places else None
        result.append((replace(finding, share=share), places))
    for name, said in settings.items():
        kl = with_setting(sides, name, restored.of)
        if kl is None or kl != restored.kl or LATER.search(name):
            result.append((_setting(said, None if kl is None else restored.share(kl), seen=kl != restored.kl), ()))
    order = sorted(result, key=lambda each: -(each[0].share or 0.0))
    return [*order, *found[_RESTORED:]]


def _setting(said: str, share: float | None, *, seen: bool = True) -> Finding:
    cause = "a key that the converter dropped, or a config of another version"
    later = "" if seen else ", which changes nothing on windows this short"
    remedy = "take the setting from DENSE's config, or convert it again"
    return Finding("setting", (), f"{said}{later}.", "certain" if seen else "possible", cause, remedy, share)


def _storage(sides: Sides, compared: dict[TensorPlace, Compared]) -> tuple[str, bool]:
    """How far the weights are off and what explains it, in a sentence, and whether the dense model is the coarser."""
    matrices = {place: found for place, found in compared.items() if len(found.shape) > 1}
    if not matrices:
        return "", False
    dtypes = [str(side.model.dtype).removeprefix("torch.") for side in (sides.dense, sides.file)]
    worst = max(found.error for found in compared.values())
    median, stored, dense_stored, excess = (
        float(np.median([getattr(found, name) for found in matrices.values()]))
        for name in ("error", "stored", "dense_stored", "excess")
    )
    coarser = dense_stored > 2 * max(stored, FLOOR)
    if worst == 0:
        run = f": what differs is the rounding of {dtypes[0]} and {dtypes[1]}" if dtypes[0] != dtypes[1] else ""
        return f"FILE holds the numbers of DENSE exactly{run}.", coarser
    if worst < FLOOR:
        return f"FILE holds the numbers of DENSE rounded to 16 bits, off by {worst:.2g} of a tensor at most.", coarser
    if excess <= 1:
        return (
            f"Half of the matrices are off by {median:.2g} of their norm or less, no more than rounding as in FILE "
            f"explains ({stored:.2g}).",
            coarser,
        )
    return (
        f"Half of the matrices are off by {median:.2g} of their norm or more, beyond rounding ({stored:.2g}) in all "
        "tensors alike, as after training, merging or compression by another method.",
        coarser,
    )


def _faults(sides: Sides, places: dict[TensorPlace, Compared]) -> list[_Told]:
    """What is wrong with each tensor."""
    told: list[_Told] = []
    searched = 0
    usual = _usual(places)
    typical = float(np.median([found.error for found in places.values() if len(found.shape) > 1] or [0.0]))
    odd_masks = _odd_masks(places)
    suspects = [place for place, found in places.items() if found.bad or place in odd_masks or _is_off(found)]
    for place in sides.by_layer(suspects):
        found = places[place]
        if found.bad:
            told.append(
                _Told(place, "", "non-finite", f"{{holds}} {found.bad:,} numbers that are not finite", "certain", 1)
            )
            continue
        if place in odd_masks:
            said = "{has} zeros in place of numbers that are as large as those that are left"
            told.append(_Told(place, "", "pruned", said, "likely", found.error))
            continue
        case = _case(sides, place, found)
        heavy = case.vector or (
            searched < _SEARCHED
            and (found.cosine < 0.9 or not case.whole or found.excess > max(1.0, _FAR * usual[place]))
        )
        match = next(filter(None, (test(case) for test in FAULTS if heavy or test not in HEAVY)), None)
        searched += heavy and not case.vector
        if match is not None:
            told.append(_matched(case, match))
        elif _odd(case, usual[place], typical):
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
    return _moved(sides, told)


def _odd_masks(places: dict[TensorPlace, Compared]) -> set[TensorPlace]:
    """The tensors whose zeros no method of pruning puts there: in place of large numbers, or of any in few tensors.

    A mask that was learnt is independent of the numbers, in most tensors of a role alike; that is honest.
    """
    roles: dict[str, list[bool]] = {}
    for place, found in places.items():
        roles.setdefault(place.role, []).append(found.sparse)
    alone = {role for role, sparse in roles.items() if sum(sparse) <= len(sparse) / 2}
    return {p for p, found in places.items() if found.gone > (_ANY if p.role in alone else _LARGE)}


def _usual(places: dict[TensorPlace, Compared]) -> dict[TensorPlace, float]:
    """The median error of the peers of each tensor, in units of what storage explains."""
    groups: dict[tuple[str, int], list[float]] = {}
    for place, found in places.items():
        groups.setdefault((place.role, min(2, len(found.shape))), []).append(found.excess)
    whole = {rank: [f.excess for f in places.values() if min(2, len(f.shape)) == rank] for rank in (1, 2)}
    found_of = {key: float(np.median(peers if len(peers) > 3 else whole[key[1]])) for key, peers in groups.items()}
    return {place: found_of[place.role, min(2, len(found.shape))] for place, found in places.items()}


def _fitting(found: Compared) -> list[tuple[float, float, dict[str, np.ndarray]]]:
    """The parts of the matrix outside of which it is honest."""
    return [part for part in found.parts() if 0 < part[0] < 0.75 and part[1] <= found.allowed and not found.turned]


def _is_off(found: Compared) -> bool:
    return found.excess > 1 or found.turned or bool(_fitting(found))


def _case(sides: Sides, place: TensorPlace, found: Compared) -> Case:
    """The part of the matrix that is off: the smallest outside of which it is honest, or all of it."""
    fitting = _fitting(found)
    W, V = (tensor.reshape(len(tensor), -1) for tensor in sides.pair(place))
    parts = min(fitting, key=lambda part: part[0])[2] if fitting else {}
    return Case(sides, place, found, part_of(W, parts), part_of(V, parts), parts)


def _odd(case: Case, usual: float, typical: float) -> bool:
    """Whether an error that no fault explains is told: a matrix that is unrelated, or one far from its peers.

    `usual` is the excess of its peers, `typical` the error of all matrices.
    """
    found = case.found
    if case.whole:
        if found.cosine < 0.5:
            return True
        far = found.error > max(_ODD, 1.5 * typical) and found.excess > max(1.0, _FAR * usual)
        role = found.error > max(_HALF, _FAR * typical) and found.excess > 1  # its peers are as far as it
        size = found.error > _WHOLE and found.excess > 1
        return (far or role or size) and abs(found.projected) > 0.1  # zero for a projection, as pruning or low rank
    usual_error = float(np.median(found.rows if case.columns is None else found.columns))
    return case.error > max(_UNRELATED if case.blocks is None else _WHOLE, 5 * usual_error)


def _matched(case: Case, match: Match) -> _Told:
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
            return f"{what}{'s' if len(numbers) > 1 else ''} {_places(numbers.tolist())}"
    return ""


def _places(numbers: Sequence[int], most: int = 4) -> str:
    """Numbers as ranges: `3, 5–7`; those beyond the first four are counted."""
    found = runs(set(numbers))
    told = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found[:most])
    return told + (f" and {len(found) - most} more places" if len(found) > most else "")


def _grouped(sides: Sides, told: Sequence[_Told]) -> Iterator[tuple[Finding, tuple[TensorPlace, ...]]]:
    """One finding for all tensors that share a fault, and the tensors."""
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[_Told]] = {}
    for each in told:
        phrase = "" if each.kind in ("differs", "non-finite", "number") else each.phrase
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
        said = f"{subject} {_conjugated(phrase, several=several)}."
        yield Finding(kind, names, said, sure, cause, remedy), tuple(each.place for each in members)


_PLURAL = {"is": "are", "has": "have", "holds": "hold", "differs": "differ"}


def _conjugated(phrase: str, *, several: bool) -> str:
    said = phrase.format(**{verb: plural if several else verb for verb, plural in _PLURAL.items()})
    return said.replace(" its ", " their ") if several else said


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
        elsewhere = same_role and layer is not None and mine is not None and layer != mine
        if sides.dense_name(each.place) == head and name == f"{names[id(embedding)]}.weight":
            each = replace(each, kind="head", phrase="{is} the embedding; DENSE has a head of its own")
        elif back:
            what, pair = ("layers", (layer, mine)) if elsewhere else ("experts", (expert, each.place.expert))
            between, group = "", tuple(sorted((unnumbered(name), unnumbered(each.place.name))))
            if same_role and len({*pair} - {None}) == 2:
                first, second = sorted(number for number in pair if number is not None)
                between, group = f" between {what} {first} and {second}", () if elsewhere else (str(mine),)
            each = replace(each, kind="exchanged", phrase=f"{{is}} exchanged{between}", group=group)
        elif elsewhere:
            ahead = (layer or 0) - (mine or 0)
            by = f"{abs(ahead)} layer{'s' * (abs(ahead) > 1)}"
            where = f"layer i of FILE holds layer i {'+' if ahead > 0 else '−'} {abs(ahead)} of DENSE"
            each = replace(each, kind="offset", phrase=f"{{is}} off by {by}: {where}")
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
            name = name.replace(f".{layers[0]}.", f".{_places(layers)}.", 1)
        of = f" of expert{'s' * (len(experts) > 1)} {_places(experts)}" if experts else ""
        parts.append(f"`{name}`{of}")
    if len(parts) > 4:
        return f"{', '.join(parts[:3])} and {len(parts) - 3} more"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
