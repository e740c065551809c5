"""A mixture of experts and a hybrid with state spaces, trained in minutes on the built-in text.

    python experiments/8_experts_and_states/small_models/run.py [--only mixture]

Trains a tokenizer and two decoders on the first half of the built-in text, less its first 4,096 tokens. The other
experiments of this chapter calibrate on those 4,096 tokens and evaluate on the second half. Writes small_models.json
beside this file, and the models to runs/experiments/small_models/. The same machine and versions give the same weights.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from experiments.common import run_command
from experiments.statements import bullets, ratio, table
from lyapunov_prune.data.documents import PlainText
from lyapunov_prune.data.text import _builtin, load_text
from lyapunov_prune.models.tokenizers import token_ids
from lyapunov_prune.results.files import write_whole
from lyapunov_prune.results.result import versions

HERE = Path(__file__).parent
FILE = HERE / "small_models.json"
MODELS = Path("runs") / "experiments" / "small_models"
SEED, CONTEXT, CALIBRATION, EVALUATION = 0, 128, 4096, 8192
SHARED: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixture": {
        "model_type": "qwen3_moe",
        **SHARED,
        "head_dim": 32,
        "intermediate_size": 384,
        "moe_intermediate_size": 384,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.02,
    },
    "hybrid": {
        "model_type": "granitemoehybrid",
        **SHARED,
        "intermediate_size": 512,
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba", "attention", "mamba", "mamba"],
        "position_embedding_type": "rope",
        "attention_multiplier": 32**-0.5,
        "mamba_n_heads": 12,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    },
}
STEPS = {"mixture": 600, "hybrid": 240}
TRAINING: dict[str, Any] = {"batch": 8, "rate": 2e-3, "warmup": 40, "decay": 0.1, "betas": (0.9, 0.95), "clip": 1.0}


def main(only: Annotated[str | None, typer.Option(help="mixture or hybrid; both if not given")] = None) -> None:
    torch.set_num_threads(1)
    for name in [only] if only else CONFIGS:
        made = small_model(name)
        kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        kept[name] = made
        write_whole(FILE, json.dumps(kept, indent=1, allow_nan=False) + "\n")


def small_model(name: str) -> dict[str, Any]:
    """Train the model of that name, keep it in MODELS, and return what is known of it."""
    tokenizer = make_tokenizer()
    tokens = len(token_ids(tokenizer, first_half()))
    half = load_text("builtin", tokenizer, tokens=tokens, context=CONTEXT)
    learn = half.ids[CALIBRATION // CONTEXT :]
    evaluation = load_text("builtin", tokenizer, tokens=EVALUATION, context=CONTEXT, split="evaluation")
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))
    model.config._name_or_path = f"small-{name}"
    before = lp.perplexity(model.eval(), evaluation)
    curve, seconds = train(model, learn, half.ids[: CALIBRATION // CONTEXT], STEPS[name])
    model.save_pretrained(MODELS / name)
    tokenizer.save_pretrained(MODELS / name)
    after = lp.perplexity(model, evaluation)
    config, active = model.config, model.num_parameters()
    if name == "mixture":
        idle = config.num_experts - config.num_experts_per_tok
        active -= idle * config.num_hidden_layers * 3 * config.hidden_size * config.moe_intermediate_size
    return {
        "config": CONFIGS[name],
        "training": {**TRAINING, "steps": STEPS[name], "seed": SEED, "tokens": learn.numel()},
        "parameters": model.num_parameters(),
        "active": active,
        "measured on": after.measured_on.line(),
        "weights": after.measured_on.model.weights,
        "text": half.text_hash,
        "untrained": before.windows.tolist(),
        "losses": after.windows.tolist(),
        "unigram": unigram(learn, evaluation.ids, SHARED["vocab_size"]).tolist(),
        "curve": curve,
        "seconds": seconds,
        "versions": versions(),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on the text that the models learn from and calibrate on."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [first_half()],
        trainers.BpeTrainer(
            vocab_size=SHARED["vocab_size"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=["<|end|>"],
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")


def first_half() -> str:
    return PlainText("builtin", _builtin()).halves()[0].content


def train(
    model: PreTrainedModel, learn: torch.Tensor, select: torch.Tensor, steps: int
) -> tuple[list[tuple[int, float, float]], dict[str, float]]:
    """Train `model` in place with AdamW and a cosine on windows that begin anywhere in `learn`.

    Returns (step, mean loss of the last 40 steps, loss on `select`) every 40 steps, and seconds of CPU and of the wall.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TRAINING["rate"], betas=TRAINING["betas"], weight_decay=TRAINING["decay"]
    )
    generator = torch.Generator().manual_seed(SEED)
    flat, offsets = learn.flatten(), torch.arange(CONTEXT)
    curve, losses, routed = [], [], model.config.model_type == "qwen3_moe"
    start = time.process_time(), time.perf_counter()
    model.train()
    for step in range(steps):
        warm = min(1.0, (step + 1) / TRAINING["warmup"])
        for group in optimizer.param_groups:
            group["lr"] = TRAINING["rate"] * warm * (0.02 + 0.49 * (1 + np.cos(np.pi * step / steps)))
        begins = torch.randint(len(flat) - CONTEXT + 1, (TRAINING["batch"], 1), generator=generator)
        ids = flat[begins + offsets]
        loss = model(
            input_ids=ids, labels=ids, use_cache=False, **({"output_router_logits": True} if routed else {})
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINING["clip"])
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 40 == 0:
            model.eval()
            curve.append((step + 1, float(np.mean(losses[-40:])), loss_on(model, select)))
            model.train()
            print(*curve[-1], round(time.perf_counter() - start[1]), flush=True)
    model.eval()
    return curve, {"cpu": time.process_time() - start[0], "wall": time.perf_counter() - start[1]}


@torch.no_grad()
def loss_on(model: PreTrainedModel, ids: torch.Tensor) -> float:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def unigram(learn: torch.Tensor, ids: torch.Tensor, vocabulary: int) -> np.ndarray:
    """The loss of each window of `ids` by the frequencies of the tokens in `learn`, one added to each count."""
    counts = torch.bincount(learn.flatten(), minlength=vocabulary).double() + 1
    return -(counts / counts.sum()).log()[ids[:, 1:]].mean(1).numpy()


def written() -> dict[str, str]:
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    rows = [
        (
            f"{name} ({of['config']['model_type']})",
            of["parameters"],
            of["active"],
            ratio(np.array(of["untrained"])),
            ratio(np.array(of["unigram"])),
            ratio(np.array(of["losses"])),
            round(of["seconds"]["wall"] / 60),
        )
        for name, of in kept.items()
    ]
    head = ("model", "parameters", "of which active", "untrained", "unigram", "trained", "minutes on busy cores")
    return {
        "setting": bullets(*(of["measured on"] for of in kept.values())),
        "perplexity": table(head, rows),
        "mixture": f"{kept['mixture']['parameters'] / 1e6:.0f}M",
    }


if __name__ == "__main__":
    run_command(main, FILE, written)
