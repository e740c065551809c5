"""Memory of the commands at a vocabulary of 262,144 tokens, and the time of `rank --criterion kl` there.

`python benchmarks/vocabulary.py` makes a Gemma 3 of 270M parameters of random weights in float32 (1.07 GB, and 7 GB of
disk for what commands write, in the current folder or `--place`; deleted after), runs every command on it as a user
does, a process each, and writes vocabulary.json beside this file. A command may need the model, the one it is compared
with where there is one, and 600 MB, the libraries among them; `prune` 1.7 models. The time of kl is held against its
multiplications, as fast as those of the head go before it and after. The same model as a .gguf file of 8 bits, with a
tokenizer of as many pieces, is loaded twice.
"""

from __future__ import annotations

import argparse
import itertools
import os
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import torch
from results import Benchmark
from run import EXACT, interleaved
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.models.structure import find_structure

VOCABULARY = 262_144
LARGE = f"vocabulary of {VOCABULARY:,}"
SHAPE = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
BESIDE, PRUNE, KL, SECOND = 600e6, 1.7, 1.3, 3.0
KL_TOKENS, BLOCK = 128, 512
# Each with how many models it may need beside what all have; 0 of what has a limit of its own.
COMMANDS = {
    "profile model": 1,
    "rank model --criterion bi --remove 4": 1,
    "rank model --criterion kl --tokens 128 --context 128 --remove 4": 1,
    "rank model --criterion angular --remove 4": 1,
    "prune model --plan rank/plan.json": 0,
    "compress model --method wanda --sparsity 0.5": 2,
    "eval model": 1,
    "eval prune --against model": 2,
    "hierarchy model prune --new-tokens 2 --tokens 128 --context 64": 2,
    "heal prune --teacher model --update-rank 8 --steps 2": 2,
}
TEXT = ("--tokens", "1024")
GGUF = "model.gguf"


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in JOBS:  # a child process: one job
        print(JOBS[sys.argv[1]](Path(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path, default=Path.cwd(), help="Where the files go for as long as it takes.")
    asked = parser.parse_args()
    found = Benchmark("vocabulary")
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-bench-", dir=asked.place) as place:
        size = int(child("build", place))
        for command, copies in COMMANDS.items():
            peak = peak_of(command, Path(place))
            print(f"{command}: peak {peak / 1e9:.2f} GB", flush=True)
            limit = copies * size + BESIDE if copies else PRUNE * size
            allowed = {0: f"{PRUNE} × the model", 1: "the model + 600 MB", 2: "model + compared model + 600 MB"}[copies]
            found.add(f"`{command.split()[0]}{_how(command)}`, {LARGE}: peak memory", allowed, peak / limit, 1.0)
        found.add(
            f"`rank --criterion kl --tokens {KL_TOKENS}`, {LARGE}: time",
            "multiplications at the head's rate",
            child("kl", place),
            KL,
        )
        size = int(child("packed", place))
        told = f"load of a .gguf file of {size / 1e6:.0f} MB, the second time"
        found.add(told, f"{SECOND:.0f} s", child("load", place) / SECOND, 1.0)
    found.save()


def child(job: str, place: str) -> float:
    """What the job says, in a process of its own: a child starts with the peak of the process that it comes from."""
    done = subprocess.run([sys.executable, __file__, job, place], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def build(place: Path) -> int:
    """The model, with a tokenizer of bytes; returns its bytes."""
    folder = place / "model"
    config = AutoConfig.for_model("gemma3_text", vocab_size=VOCABULARY, **SHAPE, dtype="float32")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return sum(p.nbytes for p in model.parameters())


def packed(place: Path) -> int:
    """The model as a .gguf file; returns its bytes."""
    model: Any = AutoModelForCausalLM.from_pretrained(place / "model")
    config, file = model.config, place / GGUF
    writer = gguf.GGUFWriter(file, "gemma3")
    shape = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": VOCABULARY,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tokenizer_model": "llama",
    }
    for name, value in shape.items():
        getattr(writer, f"add_{name}")(value)
    # Every piece of up to three letters and most of four: a longer one is made of two others in several ways, as in a
    # tokenizer that was trained, and it is those that a tokenizer is slow to load by.
    letters = (map("".join, itertools.product(string.ascii_lowercase, repeat=size)) for size in itertools.count(1))
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += itertools.islice(itertools.chain.from_iterable(letters), VOCABULARY - len(pieces))
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(number) for number in range(VOCABULARY)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # the embeddings
            kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            values = gguf.quants.quantize(tensor.numpy(), kind)
            stored = names.get_name(name, try_suffixes=(".weight",))
            assert stored is not None
            writer.add_tensor(stored, values, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return file.stat().st_size


def load(place: Path) -> float:
    """Seconds that the .gguf file takes to load the second time."""
    os.environ["LYAPUNOV_PRUNE_CACHE"] = str(place / "cache")
    lp.load(place / GGUF)
    start = time.perf_counter()
    lp.load(place / GGUF)
    return time.perf_counter() - start


def peak_of(command: str, place: Path) -> int:
    """Bytes of memory that the command held at most, libraries and pages of weight files and all."""
    words = command.split()
    words += ["-o", words[0]]
    words += () if "--tokens" in words or words[0] == "prune" else TEXT
    program = Path(sys.executable).with_name("lyapunov-prune")
    with (place / "log").open("w") as log:
        started = subprocess.Popen([program, *words], cwd=place, env=os.environ | EXACT, stdout=log, stderr=log)
        _, code, usage = os.wait4(started.pid, 0)
    if code:
        raise SystemExit(f"{command}: {(place / 'log').read_text()[-500:]}")
    return usage.ru_maxrss * 1024


@torch.no_grad()
def kl(place: Path) -> float:
    """Seconds of `rank --criterion kl` over those of its multiplications."""
    loaded = lp.load(place / "model")
    model: Any = loaded.model
    structure = find_structure(model)
    head, d = model.get_output_embeddings().weight, model.config.hidden_size
    x, logits = torch.randn(BLOCK, d), torch.empty(BLOCK, len(head))  # asked for once: new memory takes a third as long
    ids = torch.randint(1, 256, (1, KL_TOKENS), generator=torch.Generator().manual_seed(0))
    seconds = interleaved(
        {
            "head": lambda: torch.mm(x, head.T, out=logits),
            "kl": lambda: lp.rank(model, ids, criterion="kl", folder=place / "kl"),
        },
        repeats=5,
    )
    layers = structure.num_layers
    of_layer = sum(p.numel() for p in structure.layers[0].parameters() if p.ndim == 2)
    of_head = head.numel()
    # The dense model, and for each layer that is skipped those above it; of either the head.
    needed = KL_TOKENS * ((layers + layers * (layers - 1) // 2) * of_layer + (layers + 1) * of_head)
    return seconds["kl"] / (seconds["head"] * needed / (BLOCK * of_head))


def _how(command: str) -> str:
    criterion = command.partition("--criterion ")[2].split()
    return f" --criterion {criterion[0]}" if criterion else " --against" if "--against" in command else ""


JOBS = {"build": build, "kl": kl, "packed": packed, "load": load}

if __name__ == "__main__":
    main()
