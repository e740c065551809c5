"""Tests of the numbers of one file: what no honest storage of any model has.

False alarms: none in the files that this program writes (tests/diagnosis/test_check_file.py), nor in three real models
of 272, 236 and 339 tensors, from which the thresholds of the distributions were read with room to spare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from lyapunov_prune.diagnosis.finding import AGAIN, Certainty, Finding
from lyapunov_prune.diagnosis.looked import Looked, far, named
from lyapunov_prune.diagnosis.packed import COMPRESSED, GROUPED, SCALES
from lyapunov_prune.diagnosis.statistics import row_of
from lyapunov_prune.diagnosis.stored import FileTensor
from lyapunov_prune.models.weight_files import read_parts


def _finding(
    kind: str, parts: Iterable[FileTensor], said: str, certainty: Certainty, cause: str = "", remedy: str = AGAIN
) -> Iterator[Finding]:
    """One finding for all `parts`; `said` names them as `{}`. None if there are none."""
    some = list(parts)
    if some:
        yield Finding(kind, tuple(part.name for part in some), said.format(named(some)), certainty, cause, remedy)


def non_finite(file: Looked) -> Iterator[Finding]:
    """NaN or infinity, among numbers or as the scale of a block.

    Statistic: the exponent of every number and of every float16 scale. Threshold: one. No false alarms.
    """
    bad = [each for each in file.found.values() if each.bad]
    blocks = [each for each in bad if each.numbers * 16 < np.prod(each.part.shape)]
    numbers = [each for each in bad if each not in blocks]
    for some, what in ((numbers, "numbers"), (blocks, "scales of blocks")):
        count, of = sum(each.bad for each in some), sum(each.numbers for each in some)
        first = f", first in row {some[0].first}" if some and some[0].rows else ""
        said = f"{{}}: {count:,} of {of:,} {what} are NaN or infinite{first}."
        cause = "a cast of larger numbers to float16, or a division by a scale of zero"
        yield from _finding("non-finite", (each.part for each in some), said, "certain", cause)


def overflow(file: Looked) -> Iterator[Finding]:
    """Numbers at the end of float16, ±65504: a wider type was clamped.

    Statistic: their count. Threshold: one. A weight of that size by chance was never seen.
    """
    some = [each for each in file.found.values() if each.at_end]
    said = f"{{}}: {sum(each.at_end for each in some):,} numbers are ±65504, where float16 ends."
    yield from _finding(
        "overflow", (each.part for each in some), said, "certain", "bfloat16 cast to float16",
        "store these tensors as bfloat16 or float32",
    )  # fmt: skip


def lost_scales(file: Looked) -> Iterator[Finding]:
    """Scales of zero over integers that differ; scales in a packed checkpoint that are negative or denormal.

    Statistic: blocks and groups with a scale of zero and more than four different bytes, or integers; zero blocks are
    written with three at most. Packed scales below zero, or smaller than the smallest normal number of float32.
    Threshold: one. No false alarms.
    """
    some = [each for each in file.found.values() if each.lost]
    said = f"{{}}: {sum(each.lost for each in some):,} blocks have a scale of zero, and integers that differ."
    cause = "scales that were rounded to zero, or written over"
    yield from _finding("zero scale", (each.part for each in some), said, "certain", cause)
    lost = [each.scale for each in file.packed if each.lost]
    yield from _finding("zero scale", lost, "{}: scales of zero over integers that differ.", "certain", cause)
    for word, test in (("negative", _negative), ("denormal", _denormal)):
        parts = [each.part for each in file.found.values() if each.part.name.endswith(SCALES) and test(each.known)]
        yield from _finding("scale", parts, f"{{}}: scales are {word}.", "likely", "bytes of another tensor or type")


def _negative(scales: np.ndarray) -> bool:
    return bool((scales < 0).any())


def _denormal(scales: np.ndarray) -> bool:
    return bool(((scales != 0) & (np.abs(scales) < np.finfo(np.float32).tiny)).any())


def constant(file: Looked) -> Iterator[Finding]:
    """A matrix, or rows of it, hold one value.

    Statistic: rows of 16 numbers or more that are equal, compared in full. Threshold: one row of a value other than
    zero; all rows of zeros; a quarter of the rows of zeros, in a role whose other matrices have fewer than 5 %. Rows of
    zeros alone are honest: pruned neurons, tokens without embeddings.
    """
    wide = [each for each in file.found.values() if each.is_wide]
    whole = [each for each in wide if each.still == each.rows]
    some = [each for each in wide if 0 < each.still < each.rows]
    empty = [each for each in wide if each.empty == each.rows]
    cause = "a tensor that was never filled, or whose scales overflowed"
    yield from _finding("constant", (each.part for each in whole), "{}: every row holds one value.", "certain", cause)
    said = (
        f"{{}}: {sum(each.still for each in some):,} of {sum(each.rows for each in some):,} rows hold one value each."
    )
    yield from _finding("constant", (each.part for each in some), said, "certain", cause)
    yield from _finding(
        "zero", (each.part for each in empty), "{}: all numbers are zero.", "certain", "a shard that was missing"
    )
    partly = []
    for siblings in file.siblings.values():
        some = [each for each in siblings if each.is_wide]
        if some and np.median([each.empty / each.rows for each in some]) < 0.05:
            partly += [each for each in some if 0.25 <= each.empty / each.rows < 1]
    said = f"{{}}: {sum(each.empty for each in partly):,} rows are zero, and hardly any of their siblings."
    yield from _finding("zero", (each.part for each in partly), said, "likely", "a copy that was cut")
    still = [each.integers for each in file.packed if not np.ptp(each.codes)]
    yield from _finding("constant", still, "{}: all integers are the same.", "certain", cause)


def saturated(file: Looked) -> Iterator[Finding]:
    """Blocks in which nearly all numbers are at the block's ends: a scale that is too small, or clamping.

    Statistic: the share of sampled runs of 32 numbers with 29 or more at their largest or smallest; that of numbers at
    plus or minus the largest of a matrix of more than 16 values, in a fifth of its rows; for packed integers of 4 bits
    or more, the share at the ends of their range. Threshold: 5 %, 0.5 %, and half; honest files have none, one in a
    million, and 13 %.
    """
    some = [each for each in file.matrices if each.saturated > 0.05]
    said = "{}: nearly all numbers of a block are its largest or smallest."
    cause = "scales that are too small for what they scale, or a cast that clamps"
    clipped = [each for each in file.matrices if each not in some and _clipped(each.sample)]
    yield from _finding(
        "saturated", (each.part for each in clipped), "{}: the numbers are clipped at one magnitude.", "likely", cause
    )
    yield from _finding("saturated", (each.part for each in some), said, "likely", cause)
    packed = [p.integers for p in file.packed if p.bits >= 4 and np.ptp(p.codes) and p.saturated > 0.5]
    yield from _finding("saturated", packed, "{}: most integers are at the ends of their range.", "likely", cause)


def _clipped(sample: np.ndarray | None) -> bool:
    if sample is None:
        return False
    magnitudes = np.abs(sample)
    at_end = magnitudes == np.nanmax(magnitudes, initial=0)
    in_rows = float(at_end.any(1).mean())  # rounding to three values a row puts one row there
    return at_end.sum() > max(8, 0.005 * at_end.size) and in_rows > 0.2 and len(np.unique(magnitudes)) > 16


def zero_points(file: Looked) -> Iterator[Finding]:
    """Integers and zero points of two conventions, or integers with a sign read without it.

    Statistic: the mean of integer minus zero point, in steps, of every packed matrix; for other matrices their mean in
    standard deviations. Threshold: 0.5 steps in the median of all; 0.3 deviations in a matrix, where real matrices of
    layers have at most 0.016.
    """
    centred = [each.centred for each in file.packed if each.bits >= 3]
    off = float(np.median(centred)) if centred else 0.0
    if abs(off) > 0.5:
        parts = [each.integers for each in file.packed]
        said = f"{{}}: zero points are {abs(off):.2f} steps too {'low' if off > 0 else 'high'} for their integers."
        cause = "zero points stored minus one by GPTQ's first convention and as they are by the second"
        remedy = "set checkpoint_format in config.json to the other one of gptq and gptq_v2, or pack it again"
        yield from _finding("zero point", parts, said, "likely", cause, remedy)
    moved = [
        each for each in file.matrices
        if each.part.layer is not None and len(each.part.shape) == 2 and min(each.part.shape) >= 16
        and np.count_nonzero(each.known) > 512 and abs(_mean(each.known)) > 0.3
    ]  # fmt: skip
    said = "{}: the mean is far from zero, " + (f"{_mean(moved[0].known):+.2f} standard deviations." if moved else "")
    cause = "zero points or signs of integers read by another convention"
    yield from _finding("zero point", (each.part for each in moved), said, "likely", cause)


def _mean(numbers: np.ndarray) -> float:
    return float(numbers.mean(dtype=np.float64) / max(float(numbers.std(dtype=np.float64)), 1e-30))


def order_of_columns(file: Looked) -> Iterator[Finding]:
    """A g_idx that names groups that are not there, or unequally, or an order that the config denies.

    Statistic: how often every group is named. Threshold: any difference from the group size. No false alarms.
    """
    settings = file.stored.setting("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    wrong, denied = [], []
    for name, part in file.stored.parts.items():
        if not name.endswith("g_idx") or part.dtype not in ("I32", "I64"):
            continue
        told = np.fromfile(part.file, "<i4" if part.dtype == "I32" else "<i8", part.shape[0], offset=part.start)
        scale = file.stored.parts.get(name.replace("weight_g_idx", "weight_scale").replace(".g_idx", ".scales"))
        groups = int(told.max(initial=0)) + 1 if scale is None else scale.shape[0 if name.endswith(".g_idx") else 1]
        if (
            told.min(initial=0) < 0
            or told.max(initial=0) >= groups
            or (len(counts := np.bincount(told, minlength=groups)) > 1 and counts[:-1].max() != counts[:-1].min())
        ):
            wrong.append(part)
        elif settings.get("desc_act") is False and (np.diff(told) < 0).any():
            denied.append(part)
    cause = "an order of columns that belongs to another matrix"
    yield from _finding(
        "column order", wrong, "{} names groups that are not there, or some too often.", "certain", cause
    )
    said = "{} is an order of columns, and the config says that there is none (desc_act)."
    yield from _finding("column order", denied, said, "certain", "a config of another file", "set desc_act to true")


def duplicates(file: Looked) -> Iterator[Finding]:
    """Two tensors of layers with the same bytes.

    Statistic: dtype, shape and a digest of a part of the bytes, then all bytes. Threshold: equality, in matrices that
    are not constant. Embedding and head are left out: a head that is a copy of the embedding is honest. Layers that
    were doubled by a merge are told as such.
    """
    groups: dict[bytes, list[FileTensor]] = {}
    for each in file.found.values():
        if (
            each.rows > 1
            and each.still + each.empty < each.rows
            and (len(each.known) or each.part.name.endswith((COMPRESSED[0], GROUPED[0])))  # no tables of integers
            and each.part.layer is not None
            and each.part.size > 256
        ):
            groups.setdefault(each.digest, []).append(each.part)
    same = [some for some in groups.values() if len(some) > 1 and len({_bytes(part) for part in some}) == 1]
    per_layer = {
        layer: sum(p.layer == layer for p in file.stored.parts.values()) for some in same for layer in [some[0].layer]
    }
    doubled: dict[tuple[int | None, ...], list[list[FileTensor]]] = {}
    for some in same:
        doubled.setdefault(tuple(part.layer for part in some), []).append(some)
    for layers, found in doubled.items():
        parts = [part for some in found for part in some]
        if len({*layers}) > 1 and len(found) > 4 and len(found) * 3 > per_layer[found[0][0].layer]:
            said = f"Layers {' and '.join(map(str, layers))} hold the same matrices ({{}})."
            cause = "a map of names that is off by one, or a merge that doubled layers"
            yield from _finding("duplicate", parts, said, "likely", cause)
        else:
            said = "{} hold the same bytes, and the config does not tie them."
            yield from _finding("duplicate", parts, said, "certain", "a map of names that names one tensor twice")


def _bytes(part: FileTensor) -> bytes:
    digest = hashlib.blake2b()
    for some in read_parts(part.file, part.start, part.size):
        digest.update(some)
    return digest.digest()


def end_of_text(file: Looked) -> Iterator[Finding]:
    """The row of the end of a text in the head is empty: a model that never stops.

    Statistic: the norm of the row, over the median norm of sampled rows. Threshold: 5 %. Real models: 60 % and more.
    """
    head = file.head
    if head is None:
        return
    rows = file.found[head.name].sample
    if rows is None:
        return
    usual = float(np.median(np.linalg.norm(rows, axis=1)))
    for eos in file.ends:
        if eos < head.shape[0] and not np.linalg.norm(row_of(head, eos)[: rows.shape[1]]) > 0.05 * usual:
            said = f"{{}}: the row of the end of a text (id {eos}) is empty: the model cannot stop."
            cause = "a vocabulary that grew after the conversion, or rows of added tokens that were lost"
            yield from _finding("zero", [head], said, "likely", cause)


def far_from_siblings(file: Looked) -> Iterator[Finding]:
    """A matrix whose spread or largest number is far from that of its siblings in the layers around it.

    Statistic: log of the standard deviation of the numbers that are not zero, and log of the largest magnitude, minus
    the median of three siblings on either side. Threshold: a factor of 2.5 and 55 for the two (10 and 100 in the first
    and last layer), and four times what nine in ten siblings are off. Real models have at most 1.5 and 10 inside.
    """
    spread: dict[bool, list[FileTensor]] = {True: [], False: []}
    peaks: list[FileTensor] = []
    for siblings in file.siblings.values():
        some = [each for each in siblings if each.is_read and np.count_nonzero(each.known) > 256]
        if len(some) < 5:
            continue
        numbers = [each.known[each.known != 0].astype(np.float64) for each in some]
        ends = {some[0].part.layer, some[-1].part.layer}
        deviations = [float(np.log(max(x.std(), 1e-30))) for x in numbers]
        for i in far(deviations, 0.9):
            others = float(np.median(deviations))
            if some[i].part.layer not in ends or abs(deviations[i] - others) > 2.3:
                spread[deviations[i] > others].append(some[i].part)
        largest = [float(np.log(max(np.abs(x).max(), 1e-30))) for x in numbers]
        peaks += [some[i].part for i in far(largest, 4.0) if some[i].part not in spread[True] + spread[False]]
    cause = "a scale applied twice or not at all, or a tensor of another model"
    for larger, parts in spread.items():
        word = "larger" if larger else "smaller"
        said = f"{{}}: the numbers are far {word} than those of the same matrix in other layers."
        yield from _finding("scale", parts, said, "likely", cause)
    yield from _finding("scale", peaks, "{}: the largest number is far beyond those of other layers.", "likely", cause)


def shifted_norms(file: Looked) -> Iterator[Finding]:
    """Norms stored as w where 1 + w is read, or the reverse; norms of zeros.

    Statistic: over all weights of norms as they are used, the share at or below zero, and the share below one.
    Threshold: more than 4 % at or below zero (real models: at most 0.8 %), or fewer than 1.5 % below one (real models:
    at least 5 %) unless most are equal, as before training (an untrained Nemotron begins at two). In a single
    layer: the median, by a factor of 3.3, as `far_from_siblings`.
    """
    norms = {name: used for name, used in file.norms.items() if len(used)}
    zero = [file.stored.parts[name] for name, used in norms.items() if not used.any()]
    cause = "norms stored as w in one convention and as 1 + w in the other, as in Gemma"
    if norms:
        pooled = np.concatenate([used for used in norms.values() if used.any()] or list(norms.values()))
        low, below = float((pooled <= 0).mean()), float((pooled < 0.999).mean())
        untrained = float((pooled == np.median(pooled)).mean()) > 0.5
        parts = [file.stored.parts[name] for name in norms]
        if low > 0.04 and len(zero) < len(norms):
            said = f"{{}}: the weights of the norms are one too low: {low:.0%} are used as zero or less."
            yield from _finding("shift", parts, said, "likely", cause, f"add 1 to them, or {AGAIN}")
            return
        if below < 0.015 and not untrained:
            said = f"{{}}: the weights of the norms are one too high: {1 - below:.0%} are used as more than one."
            yield from _finding("shift", parts, said, "likely", cause, f"subtract 1 from them, or {AGAIN}")
            return
    yield from _finding("zero", zero, "{}: the norm multiplies by zero.", "certain", cause)
    odd: list[FileTensor] = []
    for siblings in file.siblings.values():
        some = [each.part for each in siblings if each.part.name in norms and norms[each.part.name].any()]
        ends = {some[0].layer, some[-1].layer} if some else set()
        middle = [float(np.log(max(float(np.median(np.abs(norms[part.name]))), 1e-30))) for part in some]
        odd += [some[i] for i in far(middle, 1.2) if some[i].layer not in ends]
    yield from _finding("shift", odd, "{}: the norm is far from those of the layers around it.", "possible", cause)
