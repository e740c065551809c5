"""What a pruned checkpoint says of itself: provenance.json and the model card, of both formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lyapunov_prune.checkpoints.beside import save_files
from lyapunov_prune.checkpoints.cards import as_text, write_card
from lyapunov_prune.checkpoints.reloading import RELOADED
from lyapunov_prune.errors import LyapunovPruneError, printable
from lyapunov_prune.mending.report import MendReport
from lyapunov_prune.models.gguf import PROVENANCE_KEY
from lyapunov_prune.models.gguf_header import read_header
from lyapunov_prune.models.kinds import LayerKinds, find_kinds
from lyapunov_prune.models.structure import Structure, identify
from lyapunov_prune.pruning.alone import RoundedAlone
from lyapunov_prune.pruning.gate import GateReport, crashed
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removed import ChannelsGone, ExpertsGone, PartsGone
from lyapunov_prune.pruning.stored import PLAIN, FormatNotes
from lyapunov_prune.results.frames import pd
from lyapunov_prune.results.history import HISTORY, history_of
from lyapunov_prune.results.result import LINES, Result, versions
from lyapunov_prune.results.worth import Worth

PROVENANCE = "provenance.json"
_BY_HAND = "Made by one command, which did what these do one after the other:"


@dataclass(frozen=True)
class Provenance(Result):
    """Where a pruned checkpoint came from: plan, scores, what they were measured on, and the gate.

    `kept_to_original[i]` is the index in the original model of layer `i` of the pruned one. `not_run` names
    checks of the gate that were not made: logits need the model in memory, or streamed. `format` is that of the
    checkpoint; only `compact` can lack parts of layers. `commands` would make the model
    by hand, where one command has done the work of several. `alone` is the whole model rounded to the same bytes.
    """

    source: str
    kept_to_original: tuple[int, ...]
    plan: PruningPlan
    gate: GateReport
    versions: dict[str, str]
    not_run: tuple[str, ...] = ()
    format: str = "plain"
    mended: MendReport | None = None
    commands: tuple[str, ...] = ()
    alone: RoundedAlone | None = None

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"layer": range(len(self.kept_to_original)), "original": self.kept_to_original})

    def summary(self) -> pd.DataFrame:
        """The gate's checks."""
        return self.gate.to_frame()

    def headline(self) -> str:
        mended = "" if self.mended is None else f"; {self.mended.sentence()}"
        return self.plan.sentence() + mended

    def answer(self) -> list[str]:
        checks = f"Removal check: {'passed' if self.gate.passed else 'FAILED'}, {len(self.gate.checks)} checks"
        if self.not_run:  # the gate is more than what was run of it
            checks = f"Removal checks that were run: {len(self.gate.checks)}. Not run: {', '.join(self.not_run)}"
        lines = [
            f"{self.plan.sentence()}.",
            f"{len(self.kept_to_original)} of {self.plan.model.num_layers} layers are kept.",
            f"{checks}. It shows that the removal is right, not that the model is good.",
        ]
        if self.alone is not None:
            lines.append(f"{self.alone.told()}.")
        if self.mended is not None:
            lines += [f"{line}." for line in self.mended.headline().split("\n")]
        return [*lines, *filter(None, self.plan.stability().split("\n"))][:LINES]

    def require_dense(self, dense: PreTrainedModel, name: str, made: str, option: str) -> None:
        """Raise LyapunovPruneError unless `dense`, of that name, is the model that layers left to make `made`.

        `option` is where to give another.
        """
        identity = identify(dense)
        if not self.plan.model.same_as(identity):
            raise LyapunovPruneError(
                f"{made} was not made from {name}{identity.other_settings(self.plan.model)}, but from {self.source!r} "
                f"({Path(made) / PROVENANCE}); give that one as {option}"
            )


def made_by(name: str) -> Provenance | None:
    """What a folder or GGUF file that this program wrote says of its last removal; None for any other checkpoint.

    Raises LyapunovPruneError for one that is damaged.
    """
    if not name.endswith(".gguf"):
        made = Path(name) / PROVENANCE
        return Provenance.load(made) if name and made.is_file() else None
    told = read_header(Path(name)).read(PROVENANCE_KEY)
    return None if told is None else Provenance.parse(str(told).encode(), name)


def save(
    pruned: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    remedy: str = "remove other layers",
) -> None:
    """`save_files`; a model that cannot be saved fails the gate, which names the `remedy`."""
    try:
        save_files(pruned, tokenizer, folder)
    except (OSError, SafetensorError, LyapunovPruneError):
        raise  # the disk, or a part that would be lost
    except Exception as error:
        GateReport((crashed(RELOADED, error),)).require_passed(remedy=remedy)


def describe(
    folder: Path,
    plan: PruningPlan,
    gate: GateReport,
    structure: Structure,
    pruned: PreTrainedModel,
    not_run: tuple[str, ...] = (),
    stored: FormatNotes = PLAIN,
    mended: MendReport | None = None,
    since: str = "The model has not been\ntrained after the removal.",
    sections: Mapping[str, str] | None = None,
    commands: tuple[str, ...] = (),
    worth: Worth | None = None,
    alone: RoundedAlone | None = None,
) -> Provenance:
    """Write provenance.json, the history and the model card beside the weights in `folder`.

    `structure` is the original's, `stored` the format. `since` says whether `pruned` has learnt after the removal,
    `sections` what the card tells beside plan and gate, `commands` what would make the model by hand, `worth` what it
    was measured to be worth, `alone` the whole model rounded to the same bytes.
    """
    provenance = Provenance(
        source=plan.model.name,
        kept_to_original=plan.kept,
        plan=plan,
        gate=gate,
        versions=versions(),
        not_run=not_run,
        format=stored.name,
        mended=mended,
        commands=commands,
        alone=alone,
    )
    provenance.save(folder / PROVENANCE)
    history_of(pruned).save(folder / HISTORY)
    kind, left = _kind(plan)
    by_hand = "\n".join(f"    {printable(command)}" for command in commands)
    write_card(
        folder,
        f"{Path(plan.model.name).name} {left}",
        f"{as_text(provenance.headline())}. {pruned.num_parameters():,} parameters of {plan.model.parameters:,} are "
        f"left. {since}",
        pruned,
        {
            "Removed": _removed(plan, stored),
            **({} if mended is None else {"Mended": _mended(mended)}),
            **(sections or {}),
            **({} if alone is None else {"Rounding alone": f"{as_text(alone.told())}."}),
            **({"By hand": f"{_BY_HAND}\n\n{by_hand}"} if commands else {}),
            **({"Engines": _engines(find_kinds(structure), plan.kept)} if stored.engines else {}),
            "Removal check": _checked(provenance),
        },
        tags=(f"{kind}-pruning",),
        worth=worth,
    )
    return provenance


def _kind(plan: PruningPlan) -> tuple[str, str]:
    """The kind of the pruning, for a tag, and what is left or gone, for a title."""
    depth, gone = f"with {len(plan.kept)} of {plan.model.num_layers} layers", plan.gone
    kind, parts = "depth", ""
    if isinstance(gone, ChannelsGone):
        kind = "width"
        parts = f"{gone.width - gone.fewer} of {gone.width} hidden channels in every {gone.narrowed}"
        parts = f" and {parts}" if plan.remove else f"with {parts}"
    elif isinstance(gone, ExpertsGone):
        kind, parts = "expert", f"without {gone.fewer} experts a layer"
        parts = f", {parts}" if plan.remove else parts
    elif isinstance(gone, PartsGone):
        counts = {"attentions": len(gone.attention), "activations": len(gone.activation)}
        kind, parts = "sublayer", f"without {' and '.join(f'{n} {part}' for part, n in counts.items() if n)}"
        parts = f", {parts}" if plan.remove else parts
    return kind, depth + parts if plan.remove or kind == "depth" else parts


def _removed(plan: PruningPlan, stored: FormatNotes) -> str:
    """What is gone, by which measurements, and what that saves in this format."""
    lines, gone, fitted = [], plan.gone, ""
    if plan.remove:
        lines.append(f"Layers of the original, counted from 0: {', '.join(map(str, plan.remove))}.")
    if isinstance(gone, ChannelsGone):
        lines.append(
            f"{gone.fewer} hidden channels of every {gone.narrowed} of a kept layer; `channels` in the plan "
            f"lists them (`{PROVENANCE}`)."
        )
    if isinstance(gone, PartsGone):
        fitted = ", and the merged blocks fitted," if gone.activation else ""
        activation = f"Activation of the feed-forward block (reduction {gone.reduction})"
        for part, told, layers in (
            ("attention", "Attention", gone.attention),
            ("activation", activation, gone.activation),
        ):
            if layers:
                lines.append(f"{told} of layers of the original: {', '.join(map(str, layers))}. {stored.parts[part]}")
    if isinstance(gone, ExpertsGone):
        lines += ["Experts of the original, counted from 0, and the share of the router's weight that they had:", ""]
        lines += ["| layer | experts | share |", "| --- | --- | --- |"]
        for layer, experts in gone.experts.items():
            share = "" if gone.routed is None else f"{gone.routed[layer]:.1%}"
            lines.append(f"| {layer} | {', '.join(map(str, experts))} | {share} |")
        lines += ["", "The kept experts keep their order: expert *i* of a layer here is the *i*-th kept one."]
    lines += [f"{as_text(line)}." for line in plan.stability().splitlines()]
    lines.append(f"Layer *i* of this model is layer `kept_to_original[i]` of the original (`{PROVENANCE}`).")
    if stored.note:
        lines.append(stored.note)
    texts = [as_text(m.line()) for m in plan.measured_on] or ["nothing: the layers were given by hand"]
    lines += ["", f"The scores were measured{fitted} on:", "", *(f"- {text}" for text in texts)]
    return "\n".join(lines)


def _mended(report: MendReport) -> str:
    """What the layer before each gap has learnt, what it was worth before it saw the windows that chose, and after."""
    judged = [f"- Mending: {as_text(each.told())}" for each in report.judgements]
    if not report.gaps:
        return "\n".join([f"{report.sentence().capitalize()}:", "", *judged])
    if not report.kept:
        tried = "Mending was tried and left out, because it does not help on text that was not used to fit it:"
        return "\n".join([tried, "", *judged])
    lines = [
        f"Without training: the layer before each gap took a linear map into its own parameters. Its form and its "
        f"ridge,\nfitted on {report.fitted:,} tokens, were chosen by the loss of {report.held_out:,} others, and then "
        "fitted again on all of them:",
        "",
        f"- {as_text(report.measured_on.line())}",
        "",
        "| before layer | map | held-out loss without | with |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {g.stop} | {g.forms[g.chosen]} | {g.losses[0]:.3f} | {g.losses[g.chosen]:.3f} |" for g in report.gaps]
    if judged:
        lines += ["", "On text that was not used to fit it:", "", *judged]
    return "\n".join(lines)


def _checked(provenance: Provenance) -> str:
    """The table of the gate."""
    how = "in floating point, on some tokens"
    if provenance.gate.measured_on is not None and provenance.not_run:
        how = "on the files, and in floating point on some tokens, both models read one layer at a time"
    elif provenance.not_run:
        how = "on the files alone: the layers were removed on disk, and no logits of this model have been computed"
    return gate_table(provenance.gate, how, provenance.not_run)


def gate_table(gate: GateReport, how: str = "in floating point, on some tokens", not_run: tuple[str, ...] = ()) -> str:
    """What a card says of the gate."""
    rows = ["| check | result | measured | limit |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {as_text(c.name)} | {'passed' if c.passed else 'failed'} | {c.measured:.3g} | {c.limit:.3g} |"
        for c in gate.checks
    ]
    rows += [f"| {name} | not run | | |" for name in not_run]
    return "\n".join([f"Checked when this folder was written, {how}:", "", *rows])


def _engines(kinds: LayerKinds, kept: tuple[int, ...]) -> str:
    """Who may stumble over the layers that are left, in plain words."""
    if kinds.survives(kept):
        return (
            "Every layer is of the kind that the layer of its number has in the original, so an engine that runs the\n"
            "original should need nothing but the numbers of layers and experts, which config.json gives."
        )
    repeated = f"repeat every {kinds.period} layers" if kinds.period else "follow a pattern"
    return (
        f"The layers of the original are of {len(set(kinds.kinds))} kinds, which {repeated}; those of this model\n"
        "do not any more. `transformers` reads the kind of every layer from config.json and loads it. Serving\n"
        "engines and converters that work out the kind from the layer's number instead may refuse this model or,\n"
        "worse, run layers as the wrong kind: compare a few outputs with those of `transformers` before use."
    )
