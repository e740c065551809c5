"""Options that several commands share, so that one word means one thing."""

from pathlib import Path
from typing import Annotated

import typer

from lyapunov_prune.ranking.criteria import CRITERIA

Model = Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or smollm2-135m (built in).")]
Text = Annotated[str, typer.Option(help="builtin, a .txt or .jsonl file, or a hub data set name[:config[:split]].")]
Tokens = Annotated[int, typer.Option(min=2, help="How many tokens to measure on.")]
Context = Annotated[int, typer.Option(min=2, help="Tokens in a window.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Windows in a forward.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps, or auto.")]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16, …; the checkpoint's own if not given.")]
Seed = Annotated[int, typer.Option(help="First random seed.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many perturbations to average over.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Start windows with BOS; the tokenizer's habit if not given."),
]
Offline = Annotated[bool, typer.Option(help="Never touch the network.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder for results; runs/MODEL if not given.")]
Method = Annotated[str, typer.Option(help="difference, or jvp for the forward-mode derivative.")]
Pooling = Annotated[str, typer.Option(help="energy or token.")]
Epsilon = Annotated[float, typer.Option(help="Relative size of the perturbation.")]
Compressor = Annotated[
    str, typer.Option("--method", help="magnitude, weight-only, wanda, sparsegpt, svd, whitened-svd, balanced or rtn.")
]
Schedule = Annotated[
    str,
    typer.Option(
        "--allocation",
        help="uniform, owl, alpha-pruning, atp, lyapunov, lyapunov-budget, guidelines, or bits (for rtn); or the JSON "
        "file of an Allocation.",
    ),
]
Pattern = Annotated[str | None, typer.Option(help="Keep so many of so many inputs, as 2:4 (then without --sparsity).")]
GroupSize = Annotated[int | None, typer.Option(help="Weights that share a grid (rtn); a row if not given.")]
Sparsity = Annotated[float | None, typer.Option(help="Share removed: of entries, or of parameters by low rank.")]
Rank = Annotated[int | None, typer.Option(help="Rank kept (svd, whitened-svd, balanced).")]
Bits = Annotated[float | None, typer.Option(help="Bits a weight (rtn); the mean of all with --allocation bits.")]
MaxKL = Annotated[
    float | None,
    typer.Option(
        "--max-kl", help="Instead of --remove: as many as keep KL(dense ‖ pruned) on the text below it, nats a token."
    ),
]
Criterion = Annotated[str, typer.Option(help="; ".join(f"{name}: {c.help}" for name, c in CRITERIA.items()) + ".")]
What = Annotated[
    str,
    typer.Option(
        help="layers, or their attention or mlp alone: zeroed, which saves no time (by "
        f"{', '.join(name for name, c in CRITERIA.items() if c.of_sublayers is not None)})."
    ),
]
MergeAdapter = Annotated[
    bool, typer.Option("--merge-adapter", help="MODEL holds LoRA adapters: add them to their base model's weights.")
]
Alpha = Annotated[float, typer.Option(help="Weight of |rho − 1| in the blend.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep what an interrupted run has done.")]
OnDisk = Annotated[bool, typer.Option("--on-disk", help="Copy the kept tensors; the model is never in memory.")]
KeepPeriod = Annotated[
    bool, typer.Option("--keep-period", help="Remove whole periods of a hybrid, as some serving engines need.")
]
