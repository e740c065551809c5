"""What a user waits for: whole commands beside the arithmetic of their forwards, and beside other tools' removals.

    python benchmarks/whole.py --text A.txt --report B.txt [--model MODEL ...] [--peers PYTHON]
        [--llm-drop FOLDER PYTHON] [--only WORD ...] [--before CHECKOUT]

Every command and every tool is a process of its own on one folder in float32, and its time is that of the processor,
imports and loading among it. A command's matrix products are counted while it runs (those of a backward too) and held
against plain forwards, run before and after it. A quarter of the layers goes; A chooses, B tells the perplexity. The
first PYTHON has optipfair and mergekit. CHECKOUT is a work tree of an earlier commit, whose removals run beside
today's. Each row goes into whole.json beside this file once it is measured. One that is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import Row, rows_of, save_row
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import lyapunov_prune as lp
from lyapunov_prune.cli.options import layer_indices
from lyapunov_prune.pruning.provenance import made_by
from lyapunov_prune.results.wording import ranges, runs

TOKENS, CONTEXT, SHARE = 2048, 256, 0.25
# What each command reads; `shrink` takes its defaults: texts that the model writes, or the built-in one.
READ, EXPLAINED = (f"--tokens {tokens} --context {CONTEXT}".split() for tokens in (TOKENS, CONTEXT))
SIZE = "5bpw"
SEARCH, PLAIN = 5, 2  # forwards of prune, windows of a plain forward

OPTIPFAIR = """
import sys, torch
from optipfair import analyze_layer_importance, prune_model
from transformers import AutoModelForCausalLM, AutoTokenizer
dense, ids, remove, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(dense).eval()
windows = [{"input_ids": row[None]} for row in torch.load(ids)]
scores = analyze_layer_importance(model, windows, show_progress=False)
gone = sorted(scores, key=scores.get)[: int(remove)]
prune_model(model, pruning_type="DEPTH", layer_indices=sorted(gone), show_progress=False).save_pretrained(out)
AutoTokenizer.from_pretrained(dense).save_pretrained(out)
print(sorted(gone))
"""


class Counted(TorchDispatchMode):
    """Within the block, `flops` adds up what matrix products and attentions take."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        output = func(*args, **given)
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **given, out_val=output)
        return output


def command(report: str, words: list[str]) -> None:
    """In a process of its own: one command of the program; its products and seconds go to the file `report`."""
    from lyapunov_prune.cli.app import main as program

    sys.argv = ["lyapunov-prune", *words]
    with Counted() as counted:
        try:
            program()
        except SystemExit as ended:
            if ended.code:
                raise
    Path(report).write_text(json.dumps({"flops": counted.flops, "seconds": time.process_time()}), encoding="utf-8")


def called(words: Sequence[str | Path], folder: Path | None = None, checkout: Path | None = None) -> tuple[float, str]:
    """Seconds of the processor of a process and its children, and what it printed. Raises CalledProcessError.

    The process imports the program from `checkout`, if that is given.
    """

    def used() -> float:
        found = resource.getrusage(resource.RUSAGE_CHILDREN)
        return found.ru_utime + found.ru_stime

    before = used()
    own = {} if checkout is None else {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        list(map(str, words)), check=True, cwd=folder, capture_output=True, text=True, env=os.environ | own
    )
    return used() - before, done.stdout


def commit_of(checkout: Path) -> str:
    return called(["git", "-C", checkout, "rev-parse", "--short", "HEAD"])[1].strip()


@dataclass(frozen=True)
class Ran:
    """What a command or a tool took: `flops` where they were counted; layers that are `gone` and the model `out`."""

    seconds: float
    flops: int | None = None
    gone: tuple[int, ...] = ()
    out: Path | None = None


class Model:
    """A model in a folder, `dense`, with the texts that choose and judge."""

    def __init__(self, source: str, place: Path, text: str, report: str) -> None:
        self.loaded = lp.load(source, dtype="float32")
        self.name, self.place, self.text, self.dense = Path(source).stem, place, Path(text).resolve(), place / "dense"
        self.loaded.model.save_pretrained(self.dense)
        self.loaded.tokenizer.save_pretrained(self.dense)
        self.remove = int(SHARE * self.loaded.structure.num_layers)
        self.chosen_on = lp.load_text(text, self.loaded.tokenizer, tokens=TOKENS, context=CONTEXT)
        self.judged_on = lp.load_text(report, self.loaded.tokenizer, tokens=TOKENS, context=CONTEXT, split="all")
        batches = [replace(b, text=Path(b.text).name) for b in (self.judged_on, self.chosen_on)]
        lines = [batch.measured_on(self.loaded.model).line().replace(source, self.name) for batch in batches]
        self.on = "; chosen on ".join(lines)
        self.perplexity = lp.perplexity(self.loaded.model, self.judged_on)
        with Counted() as counted:
            self.plain()
        self.flops = counted.flops

    @torch.no_grad()
    def plain(self) -> float:
        """Seconds of the processor for a forward of the first windows of the text that chooses."""
        start = time.process_time()
        for row in self.chosen_on.ids[:PLAIN]:
            self.loaded.model(row[None], use_cache=False)
        return time.process_time() - start

    def row(self, what: str, run: Callable[[], Ran]) -> Row:
        """What `run` takes beside plain forwards in turn, and the perplexity of the model that it wrote.

        Of a tool that fails the row has what it said last. One that is there already is taken as it is.
        """
        row = rows_of(self.name, self.on).get(what) or self.measured(what, run)
        print(row, flush=True)
        save_row(row, self.on)
        return row

    def measured(self, what: str, run: Callable[[], Ran]) -> Row:
        before = self.plain()
        try:
            ran = run()
        except subprocess.CalledProcessError as failed:
            return Row(self.name, what, said=failed.stderr.strip().splitlines()[-1])
        forward, ratio = (before + self.plain()) / 2, None
        if ran.gone or ran.out:
            changed = lp.load(str(ran.out)).model if ran.out else lp.remove_layers(self.loaded.model, ran.gone)
            ratio = lp.perplexity(changed, self.judged_on).ratio_to(self.perplexity)
        counted = ran.flops and ran.flops / self.flops
        return Row(self.name, what, ran.seconds, forward, counted, ranges(ran.gone, " to "), ratio)

    def others(self, kept: Sequence[int]) -> tuple[int, ...]:
        return tuple(k for k in range(self.loaded.structure.num_layers) if k not in kept)

    def own(self, words: Sequence[str | Path], out: Path | None = None, checkout: Path | None = None) -> Ran:
        """A command of the program, without the kept work of an earlier one; `out` is the model that it writes."""
        told = self.place / "told.json"
        written: list[str | Path] = [] if out is None else ["-o", out]
        with tempfile.TemporaryDirectory(dir=self.place) as empty:
            called([sys.executable, __file__, "command", told, *words, *written, "--quiet"], Path(empty), checkout)
        found = json.loads(told.read_text(encoding="utf-8"))
        made = made_by(str(out)) if out else None
        return Ran(found["seconds"], found["flops"], made.plan.remove if made else (), out)

    def commands(self, only: Sequence[str], before: Path | None) -> None:
        """The rows of the program whose names have one of the words `only`, and those that they need.

        Removals are made by the checkout `before` too, if there is one.
        """
        on: list[str | Path] = ["--text", self.text]
        remove = ["--remove", str(self.remove)]
        found = self.place / "again"

        def row(what: str, *words: str | Path, out: str = "") -> Row | None:
            wanted = not only or any(word in what for word in only)
            return self.row(what, partial(self.own, words, self.place / out if out else None)) if wanted else None

        row("`profile --seeds 1`", "profile", self.dense, *on, *READ, "--seeds", "1")
        search = ["--search", str(SEARCH)]
        searched = row(f"`prune --search {SEARCH}`", "prune", self.dense, *on, *READ, *remove, *search, out="pruned")
        row(f"`shrink --size {SIZE}`", "shrink", self.dense, "--size", SIZE, out="sized.gguf")
        if searched is not None:
            gone = layer_indices("removed", searched.removed.replace(" to ", "-"))
            self.kept = self.others(gone)
            known: list[str | Path] = ["prune", self.dense, "--layers", ",".join(map(str, gone))]
            self.row("`prune --layers`, the same", partial(self.own, known, found))
            if not found.exists():  # its row was there
                self.own(known, found)
            self.row("`explain`, of that", partial(self.own, ["explain", self.dense, found, *on, *EXPLAINED]))
        for command, options in {"prune": [*on, *READ], "shrink": []}.items():
            words: list[str | Path] = [command, self.dense, *options, *remove]
            what = f"`{command} --remove {SHARE:.0%}`"
            if row(what, *words, out=f"{command}-now") and before:
                self.row(f"{what} of {commit_of(before)}", partial(self.own, words, self.place / command, before))

    def optipfair(self, python: Path) -> Ran:
        """The layers of least importance by its own measurement, removed and written by it."""
        ids, out = self.place / "ids.pt", self.place / "optipfair"
        torch.save(self.chosen_on.ids, ids)
        seconds, said = called([python, "-c", OPTIPFAIR, self.dense, ids, str(self.remove), out])
        return Ran(seconds, gone=tuple(json.loads(said.strip().splitlines()[-1])), out=out)

    def mergekit(self, python: Path) -> Ran:
        """It has no scores: the slices that are left once `prune` has chosen."""
        asked, out = self.place / "slices.yml", self.place / "mergekit"
        kept = [[first, last + 1] for first, last in runs(self.kept)]
        slices = [{"sources": [{"model": str(self.dense), "layer_range": layers}]} for layers in kept]
        asked.write_text(json.dumps({"slices": slices, "merge_method": "passthrough", "dtype": "float32"}))
        return Ran(called([python.with_name("mergekit-yaml"), asked, out])[0], gone=self.others(self.kept), out=out)

    def llm_drop(self, folder: Path, python: Path) -> Ran:
        """Its block drop, on a copy whose settings have the names of transformers 4, which it needs."""
        out, data, older = (self.place / name for name in ("llm_drop", "data", "older"))
        data.mkdir()
        shutil.copytree(self.dense, older)
        theta = {"rope_theta": self.loaded.model.config.rope_parameters.get("rope_theta"), "rope_parameters": None}
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
        for file, more in (("config.json", theta), ("tokenizer_config.json", names)):
            settings = json.loads((older / file).read_text(encoding="utf-8")) | more
            (older / file).write_text(json.dumps(settings), encoding="utf-8")
        text = self.loaded.tokenizer.decode(self.chosen_on.ids.flatten())
        (data / "calibration.json").write_text(json.dumps([{"text": text}]), encoding="utf-8")
        about = {"calibration": {"file_name": "calibration.json", "columns": {"prompt": "text"}}}
        (data / "dataset_info.json").write_text(json.dumps(about), encoding="utf-8")
        words = (
            f"--stage=prune --dataset=calibration --split=train --prune_data_type=pt --cutoff_len={CONTEXT} "
            f"--n_calibration_samples={TOKENS // CONTEXT} --prune_method=block_drop --drop_n={self.remove}"
        ).split()
        words += [f"--model_name_or_path={older}", f"--dataset_dir={data}", f"--output_dir={out}"]
        words += [f"--prune_model_save_path={out / 'checkpoint'}"]
        program: list[str | Path] = [python, folder / "src" / "compress.py", *words]
        steps = [f"--block_drop_method={step}" for step in ("discrete", "post_dropping")]
        seconds = sum(called([*program, step], folder / "src")[0] for step in steps)
        left = json.loads((out / "checkpoint" / "reserved_layers.json").read_text(encoding="utf-8"))
        return Ran(seconds, gone=self.others(left))


def main() -> None:
    if sys.argv[1:2] == ["command"]:
        command(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="As the commands take it; default: the built-in model.")
    parser.add_argument("--text", required=True, help="Chooses.")
    parser.add_argument("--report", required=True, help="Judges.")
    parser.add_argument("--peers", type=Path, help="A python that has optipfair and mergekit.")
    parser.add_argument("--only", action="append", default=[], help="The commands that have this word; default: all.")
    parser.add_argument("--before", type=Path, help="A checkout of an earlier commit.")
    parser.add_argument("--llm-drop", nargs=2, type=Path, help="A checkout, and a python that has what it needs.")
    asked = parser.parse_args()
    for source in asked.model or ["smollm2-135m"]:
        with tempfile.TemporaryDirectory(prefix="lyapunov-prune-bench-") as place:
            model = Model(source, Path(place), asked.text, asked.report)
            model.commands(asked.only, asked.before)
            if asked.peers:
                model.row("optipfair, its cosine importance", partial(model.optipfair, asked.peers))
                model.row("mergekit, the layers of `prune`", partial(model.mergekit, asked.peers))
            if asked.llm_drop:
                model.row("LLM-Drop, block drop", partial(model.llm_drop, *asked.llm_drop))


if __name__ == "__main__":
    main()
