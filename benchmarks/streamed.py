"""A Llama larger than memory: profiled, ranked, pruned by eight layers, gated, scored, compressed by `--device disk`.

`python benchmarks/streamed.py` takes 7B parameters in bfloat16 made of random weights, 13 GB of files that are deleted
after (skipped where the disk is short), and writes streamed.json beside this file; `--size 0.5B` is smaller and writes
nothing. Each job is a process of its own. Its time is held against what it cannot do without: reading the files once a
pass, as fast as a plain read of them goes, and the multiplications of its layers (attention's among them) and head, as
fast as one layer's go before and after it; of `compress` also the method itself, on the matrices of a layer, what the
library does to packed integers, and a `cp` of what it writes. What `prune` reads and copies is read and copied plainly
before and after it, in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from results import Benchmark
from run import status
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.calibration.statistics import Statistics
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.tensor_files import read_header
from lyapunov_prune.compression.grids import Grid, stepped
from lyapunov_prune.compression.methods.wanda import Wanda
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.export.streamed import compress_on_disk
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.streamed import layer_held, stream_of
from lyapunov_prune.models.structure import find_structure
from lyapunov_prune.profiles.profile import profile_layers

SIZES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
}
VOCABULARY, REMOVE = 32_000, 8
CONTEXT, WINDOWS = 512, 8  # what commands take where nothing is asked for
KL_TOKENS = 128  # of one window: L/2 times the multiplications of a forward
PATTERN = (2, 4)
BITS, GROUP = 4, 128
MEMORY, LIMIT = 6e9, 1.3
GATE_TOKENS = 128


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in JOB:  # a child process: do one job and report
        print(json.dumps(JOB[sys.argv[1]](Path(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="7B")
    parser.add_argument("--place", type=Path, default=Path.cwd(), help="Where the files go for as long as it takes.")
    asked = parser.parse_args()
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, **SIZES[asked.size], dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    needed = 8 * model.num_parameters()  # the files, those of the pruned and of the compressed, and a copy
    free = shutil.disk_usage(asked.place).free
    if needed > free:
        short = f"needs {needed / 1e9:.1f} GB of disk at {asked.place} and {free / 1e9:.1f} are free"
        print(f"skipped: {asked.size} {short}; give another --place, or a smaller --size")
        return
    found = Benchmark("streamed")
    with tempfile.TemporaryDirectory(prefix="lyapunov-prune-bench-", dir=asked.place) as place:
        build(model, Path(place) / "source")
        for job in JOB:
            done = subprocess.run([sys.executable, __file__, job, place], check=True, stdout=subprocess.PIPE, text=True)
            told = json.loads(done.stdout)
            passes = f"{told['passes']} passes of {told['read']:.1f} s"
            print(f"{job}: {told['seconds']:.1f} s, {passes}, peak {told['peak'] / 1e9:.2f} GB")
            what = f"`{NAMED.get(job, job)} --device disk`, {asked.size}"
            least = AGAINST.get(job, "reading once a pass + multiplications")
            found.add(f"{what}: time", least, told["seconds"] / told["least"], LIMIT)
            found.add("the same: peak memory", f"{MEMORY / 1e9:.0f} GB", told["peak"] / MEMORY, 1.0)
            if asked.size == "7B":
                found.save()


def build(model: Any, folder: Path) -> None:
    """A shard a layer, and one block of normal numbers again and again."""
    model.config.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    block = (0.02 * torch.randn(2**20 + 7, generator=generator)).bfloat16().view(torch.int16).numpy()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        shards.setdefault(".".join(name.split(".")[:3]), {})[name] = tensor
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards.values()):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        made = {}
        for place, (name, tensor) in enumerate(tensors.items()):
            turned = np.resize(np.roll(block, 8191 * number + 1021 * place), tensor.numel())
            values = torch.from_numpy(turned).view(torch.bfloat16).view(tensor.shape)
            made[name] = torch.ones_like(values) if "norm" in name else values
            where[name] = file
        save_file(made, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def reading(folder: Path) -> float:
    """Seconds of a plain read of the files."""
    start, buffer = time.perf_counter(), bytearray(2**24)
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


@torch.no_grad()
def seconds_a_token(model: Any) -> tuple[float, float]:
    """Of the products of one layer, attention's too, and of the head, on windows of CONTEXT: the median of five."""
    with layer_held(model, 0):
        layer = find_structure(model).layers[0]
        matrices = [m.weight for m in layer.modules() if isinstance(m, torch.nn.Linear)]
        of_layer = _median(lambda: [torch.randn(CONTEXT, W.shape[1]).bfloat16() @ W.T for W in matrices])
        drawn = _median(lambda: [torch.randn(CONTEXT, W.shape[1]).bfloat16() for W in matrices])
    heads = model.config.num_attention_heads
    q, k, v = torch.randn(3, 1, heads, CONTEXT, model.config.hidden_size // heads).bfloat16()
    of_layer += _median(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    head, x = model.get_output_embeddings().weight, torch.randn(CONTEXT, model.config.hidden_size).bfloat16()
    return (of_layer - drawn) / CONTEXT, _median(lambda: x @ head.T) / CONTEXT


def _median(job: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]


def measured(
    place: Path, name: str, job: Callable[[Decoder, torch.Tensor], object], more: Callable[[Any], float] = lambda _: 0.0
) -> dict[str, float]:
    """A job on a streamed model: its seconds, loading among them, and those it cannot do without, `more` among them."""
    read = reading(place / name)
    start = time.perf_counter()
    loaded = lp.load_streamed(place / name)
    model: Any = loaded.model
    rows = {"layer": 0, "head": 0}

    def count(part: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            rows[part] += output.shape[:-1].numel()

        return hook

    # A matrix of every layer, through which go all tokens that do through the layer.
    layers: Any = find_structure(model).layers
    hooks = [layer.mlp.up_proj.register_forward_hook(count("layer")) for layer in layers]
    hooks.append(model.get_output_embeddings().register_forward_hook(count("head")))
    ids = torch.randint(VOCABULARY, (WINDOWS, CONTEXT), generator=torch.Generator().manual_seed(0))
    loading, stream = time.perf_counter() - start, cast(Any, stream_of(model))
    passes = 1 + stream.passes  # one for the digests
    before = seconds_a_token(model)
    passes -= stream.passes
    start = time.perf_counter()
    job(loaded, ids)
    seconds, peak = loading + time.perf_counter() - start, status("VmHWM")
    passes += stream.passes
    for hook in hooks:
        hook.remove()
    of_layer, of_head = ((a + b) / 2 for a, b in zip(before, seconds_a_token(model), strict=True))
    least = passes * read + rows["layer"] * of_layer + rows["head"] * of_head + more(model)
    return {"seconds": seconds, "least": least, "passes": passes, "read": read, "peak": peak}


def profile(place: Path) -> dict[str, float]:
    return measured(place, "source", lambda loaded, ids: profile_layers(loaded.model, ids))


def rank(place: Path) -> dict[str, float]:
    def job(loaded: Decoder, ids: torch.Tensor) -> None:
        lp.rank(loaded.model, ids, criterion="angular", remove=REMOVE).plan(REMOVE).save(place / "plan.json")

    return measured(place, "source", job)


def kl(place: Path) -> dict[str, float]:
    def job(loaded: Decoder, ids: torch.Tensor) -> None:
        lp.rank(loaded.model, ids[:1, :KL_TOKENS], criterion="kl", folder=place)

    def of_head(model: Any) -> float:  # whose matrix is multiplied with, and no module is called
        return (find_structure(model).num_layers + 1) * KL_TOKENS * seconds_a_token(model)[1]

    return measured(place, "source", job, of_head)


def prune(place: Path) -> dict[str, float]:
    """Every file is read for its digest and for the gate, and what is kept is copied: more than memory may keep.

    So what it is held against reads and copies as many bytes in the same order, once before it and once after.
    """
    source, target = place / "source", place / "target"
    plan = lp.PruningPlan.load(place / "plan.json")
    kept = [file for file in sorted(source.glob("*.safetensors")) if _layer(file) not in plan.remove]

    def plainly() -> float:
        copied = place / "copied"
        copied.mkdir()
        os.sync()  # what was written before is not waited for
        start = time.perf_counter()
        reading(source)
        subprocess.run(["cp", *kept, copied], check=True)
        for folder in (copied, source, copied):
            reading(folder)
        seconds = time.perf_counter() - start
        shutil.rmtree(copied)
        return seconds

    before = plainly()
    os.sync()
    start = time.perf_counter()
    outline = read_outline(source, source)
    prune_on_disk(outline, plan, target, stream=True)
    seconds, peak = time.perf_counter() - start, status("VmHWM")
    files = (before + plainly()) / 2
    of_layer, of_head = seconds_a_token(lp.load_streamed(target).model)
    tokens_of_layers = GATE_TOKENS * (2 * outline.decoder.structure.num_layers - REMOVE)
    least = files + tokens_of_layers * of_layer + 2 * GATE_TOKENS * of_head
    return {"seconds": seconds, "least": least, "passes": 1, "read": files, "peak": peak}


def _layer(file: Path) -> int:
    """The layer that a shard of `build` holds; -1 of one that holds none."""
    name = next(iter(read_header(file)))
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def perplexity(place: Path) -> dict[str, float]:
    return measured(place, "target", lambda loaded, ids: lp.perplexity(loaded.model, ids))


def compress(place: Path) -> dict[str, float]:
    """Every file that is written is read once more, to see that it holds what was written."""
    target = place / "compressed"

    def job(loaded: Decoder, ids: torch.Tensor) -> None:
        compress_on_disk(loaded.model, loaded.tokenizer, target, ids, method="wanda", pattern=PATTERN)

    return measured(place, "source", job, lambda model: reading(target) + copying(target) + of_method(model, masked))


def masked(W: torch.Tensor) -> None:
    norms = torch.ones(W.shape[1], dtype=torch.float64)
    Wanda(PATTERN)(W, 1 - PATTERN[0] / PATTERN[1], Statistics(norms))


def pack(place: Path) -> dict[str, float]:
    """As `compress`; what is read once more is unpacked by the library, as transformers has it do."""
    target = place / "packed"
    rounded: dict[str, Any] = {"method": "rtn", "bits": BITS, "group_size": GROUP, "symmetric": True}

    def job(loaded: Decoder, ids: torch.Tensor) -> None:
        compress_on_disk(loaded.model, loaded.tokenizer, target, format="packed", **rounded)

    return measured(place, "source", job, lambda model: reading(target) + copying(target) + of_method(model, packed))


def packed(W: torch.Tensor) -> None:
    steps = stepped(W, BITS, GROUP, symmetric=True)
    grid = Grid(steps.integers(W.double()).to(torch.int8), steps.scale.to(W.dtype))
    grid.values()
    integers = unpack_from_int32(pack_to_int32(grid.integers, BITS), BITS, W.shape)
    dequantize(integers, grid.scale, args=QuantizationArgs(num_bits=BITS, strategy="group", group_size=GROUP))  # type: ignore[arg-type]


@torch.no_grad()
def of_method(model: Any, method: Callable[[torch.Tensor], None]) -> float:
    """Seconds of `method` on the matrices of one layer, times the layers."""
    layers = find_structure(model).layers
    with layer_held(model, 0):
        matrices = [m.weight for m in layers[0].modules() if isinstance(m, torch.nn.Linear)]
        start = time.perf_counter()
        for W in matrices:
            method(W)
        return (time.perf_counter() - start) * len(layers)


def copying(folder: Path) -> float:
    """Seconds of a `cp` of the folder."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(["cp", "-r", folder, folder.with_name("copied")], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder.with_name("copied"))
    return seconds


JOB = {job.__name__: job for job in (profile, rank, prune, perplexity, kl, compress, pack)}
AGAINST = {
    "prune": "as many bytes read and copied in the same order + multiplications",
    "compress": "reading once a pass + multiplications + method + `cp`",
    "pack": "reading once a pass + method + the library's packing and unpacking + `cp`",
}
NAMED = {
    "rank": "rank --criterion angular",
    "kl": f"rank --criterion kl --tokens {KL_TOKENS}",
    "perplexity": "eval",
    "compress": f"compress --method wanda --sparsity {PATTERN[0]}:{PATTERN[1]}",
    "pack": f"compress --method rtn --bits {BITS} --format packed",
}

if __name__ == "__main__":
    main()
