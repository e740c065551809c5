"""A streamed model gives the numbers of the one in memory, holds one layer, and reads its files once a forward."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families.zoo import make_zoo
from helpers import make_small, make_tiny, saved
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune.checkpoints import layer_stream as streaming
from lyapunov_prune.checkpoints.outline import Outline, read_outline
from lyapunov_prune.checkpoints.streamed import load_streamed, streamed
from lyapunov_prune.errors import LyapunovPruneError, NonFiniteError
from lyapunov_prune.evaluation.evaluation import zero_share
from lyapunov_prune.forward import scoring
from lyapunov_prune.forward.logits import SAME_LIMIT, deviation
from lyapunov_prune.forward.reading import read
from lyapunov_prune.models import device
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.streamed import layer_held, stream_of
from lyapunov_prune.models.structure import find_structure, identify
from lyapunov_prune.predictions.divergence import skip_divergence
from lyapunov_prune.profiles.profile import profile_layers

# Both kinds of sublayers, one in a row of tokens (OPT), parallel ones (GPT-NeoX), windows of other lengths, experts.
SUBLAYERS = ["llama", "opt", "gpt_neox"]


@pytest.fixture(autouse=True)
def _in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row after the other goes through a layer."""
    monkeypatch.setattr(streaming, "TOKENS", 1)


def divergences(model: PreTrainedModel, ids: torch.Tensor) -> list[np.ndarray]:
    found = skip_divergence(model, ids)
    return [found.variance, found.kl, found.reverse_kl, found.flipped, found.variance_r]


def held(model: PreTrainedModel) -> list[int]:
    """The layers that hold weights now."""
    layers = find_structure(model).layers
    return [i for i, layer in enumerate(layers) if not all(p.is_meta for p in layer.parameters())]


# The same numbers.


def test_every_kind_of_layer_gives_the_same_numbers(
    family: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_tiny(family), tokenizer, tmp_path / "tiny")
    whole, apart = load(folder).model, load_streamed(folder).model
    a, b = (profile_layers(model, ids, seeds=(0, 1)) for model in (whole, apart))
    np.testing.assert_allclose(a.contraction.rho, b.contraction.rho, rtol=1e-5)
    np.testing.assert_allclose(a.contraction.floor, b.contraction.floor, rtol=1e-3)
    np.testing.assert_allclose(a.influence.influence, b.influence.influence, rtol=1e-5)
    np.testing.assert_allclose(a.influence.change, b.influence.change, rtol=1e-5)
    assert b.measured_on == a.measured_on
    c, d = (lp.perplexity(model, ids).windows for model in (whole, apart))
    np.testing.assert_allclose(c, d, rtol=1e-6)
    e, f = (lp.rank(model, ids, criterion="angular", remove=2).plan(2) for model in (whole, apart))
    np.testing.assert_allclose(e.scores, f.scores, rtol=1e-6)
    for wanted, found in zip(*(divergences(model, ids) for model in (whole, apart)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert zero_share(whole) == zero_share(apart)
    assert held(apart) == []


def test_what_compact_layers_have_lost_is_known_from_the_config(
    family: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_small(family), tokenizer, tmp_path / "small")
    whole, apart = load(folder).model, load_streamed(folder).model
    assert identify(apart) == identify(whole)
    a, b = (profile_layers(model, ids, seeds=(0,)) for model in (whole, apart))
    np.testing.assert_allclose(b.contraction.rho, a.contraction.rho, rtol=1e-5)
    np.testing.assert_allclose(b.influence.influence, a.influence.influence, rtol=1e-5)
    np.testing.assert_allclose(lp.perplexity(apart, ids).windows, lp.perplexity(whole, ids).windows, rtol=1e-6)
    for wanted, found in zip(*(divergences(model, ids) for model in (whole, apart)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert held(apart) == []


@pytest.mark.parametrize("name", SUBLAYERS)
def test_attentions_rank_the_same(
    name: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_tiny(name), tokenizer, tmp_path / "tiny")
    whole, apart = (
        lp.rank(made(folder).model, ids, criterion="bi", what="attention") for made in (load, load_streamed)
    )
    np.testing.assert_allclose(whole.scores, apart.scores, rtol=1e-5)  # type: ignore[attr-defined]


def test_the_derivative_is_followed_too(ids: torch.Tensor, checkpoint: Path) -> None:
    a, b = (lp.measure_contraction(made(checkpoint).model, ids, method="jvp") for made in (load, load_streamed))
    np.testing.assert_allclose(a.rho, b.rho, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_dtype_is_the_one_asked_for(dtype: str, ids: torch.Tensor, checkpoint: Path) -> None:
    whole, apart = (made(checkpoint, dtype=dtype).model for made in (load, load_streamed))
    assert apart.dtype == whole.dtype == getattr(torch, dtype)
    with torch.no_grad():
        assert deviation(*(m(ids, use_cache=False).logits for m in (apart, whole))) <= SAME_LIMIT[whole.dtype]
    assert identify(apart).same_as(identify(whole))


@pytest.mark.parametrize("name", ["gptj", "codegen", "gemma2", "bamba"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_no_checkpoint_holds_is_what_loading_makes_of_it(
    name: str, dtype: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_zoo(name), tokenizer, tmp_path / "tiny")
    whole, apart = load(folder, dtype=dtype).model, streamed(read_outline(folder, folder, getattr(torch, dtype))).model
    buffers = {path: x for path, x in apart.named_buffers() if not x.is_meta}
    assert buffers
    for path, found in buffers.items():
        wanted = whole.get_buffer(path)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert apart.config.to_dict() == whole.config.to_dict()


def test_ties_and_shards_are_followed(ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_tiny("llama", tie_word_embeddings=True)
    folder = saved(model, tokenizer, tmp_path / "tiny", max_shard_size="20KB")
    apart: Any = load_streamed(folder).model
    assert apart.lm_head.weight is apart.model.embed_tokens.weight
    assert identify(apart) == identify(load(folder).model)
    with torch.no_grad():
        assert torch.equal(apart(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_a_few_tokens_are_decoded_through_the_cache(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "TOKENS", 4096)
    whole, apart = load(checkpoint).model, load_streamed(checkpoint).model
    assert torch.equal(*(m.generate(ids[:1, :8], max_new_tokens=4, do_sample=False) for m in (whole, apart)))


# Memory and reading.


def test_one_layer_is_in_memory_and_the_files_are_read_once_a_forward(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_streamed(checkpoint)
    stream, reads, seen = stream_of(loaded.model), list[str](), list[list[int]]()
    assert stream is not None
    fill = Outline.fill
    monkeypatch.setattr(Outline, "fill", lambda self, memory, name: reads.append(name) or fill(self, memory, name))
    hooks = [x.register_forward_hook(lambda *_: seen.append(held(loaded.model))) for x in loaded.structure.layers]
    lp.block_influence(loaded.model, ids)
    for hook in hooks:
        hook.remove()
    assert seen == [[i] for i in range(loaded.structure.num_layers)]
    names = [name for name in loaded.model.state_dict() if name.startswith(loaded.structure.layers_path)]
    assert sorted(reads) == sorted(names)
    assert held(loaded.model) == []


def test_what_was_not_tried_is_never_split(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "TOKENS", 1)
    whole, apart = load(checkpoint).model, streamed(read_outline(checkpoint, checkpoint)).model
    monkeypatch.setattr(streaming.LayerStream, "_pieces", pytest.fail)
    with torch.no_grad():
        assert torch.equal(*(model(ids, use_cache=False).logits for model in (whole, apart)))


def test_a_layer_is_read_into_the_memory_of_the_one_before_where_it_fits(checkpoint: Path) -> None:
    loaded = load_streamed(checkpoint)
    whole, (first, second, *_) = load(checkpoint).structure.layers, loaded.structure.layers
    name = next(name for name, p in first.named_parameters() if p.ndim == 2)
    with layer_held(loaded.model, 0):
        place = first.get_parameter(name).data_ptr()
    with layer_held(loaded.model, 1):
        assert second.get_parameter(name).data_ptr() == place
        assert torch.equal(second.get_parameter(name), whole[1].get_parameter(name))
    stream: Any = stream_of(loaded.model)
    stream._meant[0][name] = nn.Parameter(stream._meant[0][name].double(), False)  # a layer of another kind
    with layer_held(loaded.model, 0):
        assert first.get_parameter(name).data_ptr() != place
        assert torch.equal(first.get_parameter(name), whole[0].get_parameter(name).double())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("measure", [lp.block_influence, lp.perplexity])
def test_weights_leave_after_an_error_too(
    measure: Callable[..., Any], error: type[BaseException], checkpoint: Path, ids: torch.Tensor
) -> None:
    loaded, windows = load_streamed(checkpoint), lp.perplexity(load(checkpoint).model, ids[:, :16]).windows

    def stop(*args: Any) -> None:
        raise error("no more")

    hook = loaded.structure.layers[3].register_forward_hook(stop)
    with pytest.raises(error, match="no more"):
        measure(loaded.model, ids)
    hook.remove()
    assert held(loaded.model) == []
    np.testing.assert_allclose(lp.perplexity(loaded.model, ids[:, :16]).windows, windows, rtol=1e-6)


def test_what_was_read_of_a_layer_leaves_when_the_rest_is_not_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, fill = load_streamed(checkpoint).model, list[str](), Outline.fill

    def stop(self: Outline, memory: torch.Tensor, name: str) -> None:
        if read:
            raise KeyboardInterrupt
        read.append(name)
        fill(self, memory, name)

    monkeypatch.setattr(Outline, "fill", stop)
    with pytest.raises(KeyboardInterrupt), layer_held(model, 0):
        pytest.fail("it is not held")
    assert held(model) == []


def test_a_layer_that_is_held_runs_often_and_is_read_once(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, names, fill = read(load_streamed(checkpoint), ids), list[str](), Outline.fill
    prefix, layer = reading.prefix, 2
    hidden = torch.randn(*ids.shape, reading.model.config.hidden_size)

    def count(self: Outline, memory: torch.Tensor, name: str) -> None:
        names.append(name)
        fill(self, memory, name)

    monkeypatch.setattr(Outline, "fill", count)
    with layer_held(reading.model, layer):
        once = [*names]
        for _ in range(2):
            prefix.advance(ids, layer, hidden, layer + 1)
        assert names == once
        assert held(reading.model) == [layer]
    assert held(reading.model) == []


def test_logits_are_formed_a_block_at_a_time(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_streamed(checkpoint)
    monkeypatch.setattr(scoring, "_ENTRIES", 260 * 8)
    rows: list[int] = []
    head: Any = loaded.model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: rows.append(output.shape[-2]))
    found = lp.perplexity(loaded.model, ids)
    assert max(rows[1:]) <= 32  # the first tokens, on which the head is tried; then eight at a time
    assert rows[-1] <= 8
    np.testing.assert_allclose(found.windows, lp.perplexity(load(checkpoint).model, ids).windows, rtol=1e-6)


# What cannot be streamed, or fails on the way.


@pytest.mark.parametrize(
    "use",
    [
        lambda model, ids: lp.remove_layers(model, [1]),
        lambda model, ids: lp.compress(model, ids, method="wanda", sparsity=0.5),
        lambda model, ids: lp.heal(model, model, ids, steps=1),
        lambda model, ids: lp.measure_sensitivity(model, ids),
        lambda model, ids: lp.probe_layers(model, ids),
        lambda model, ids: lp.check_bounds(model, ids, sparsity=0.5),
        lambda model, ids: lp.compare_generation(model, model, ids[:, :8], steps=2),
        lambda model, ids: lp.measure_speed({"a": model}),
        lambda model, ids: lp.verify_removal(model, model, [1]),
        lambda model, ids: lp.PruningPlan.given(model, [1]),
        lambda model, ids: lp.mend(model, [1], ids),
    ],
)
def test_what_needs_the_weights_says_so(
    use: Callable[[PreTrainedModel, torch.Tensor], object], checkpoint: Path, ids: torch.Tensor
) -> None:
    with pytest.raises(LyapunovPruneError, match="read from disk one by one"):
        use(load_streamed(checkpoint).model, ids)


def test_what_runs_the_model_once_a_layer_says_so(checkpoint: Path, ids: torch.Tensor) -> None:
    model = load_streamed(checkpoint).model
    layers = "rho, bi, blend, blend-minmax, angular, kl, cosine, from-end, random"
    parts = "bi, from-end, random"
    for criterion, what, names in (
        ("oracle", "layers", layers),
        ("best", "layers", layers),
        ("kl", "attention", parts),
    ):
        with pytest.raises(LyapunovPruneError, match=f"{criterion} .* one of {names}$"):
            lp.rank(model, ids, criterion=criterion, what=what, remove=2)
    with pytest.raises(LyapunovPruneError, match=r"all windows.*batch size"):
        lp.block_influence(model, ids, batch_size=2)


@pytest.mark.parametrize(("name", "why"), [("gemma3n_text", "layer 0 needs more than"), ("rwkv", "cannot be judged")])
def test_a_decoder_that_cannot_be_read_layer_by_layer_is_refused_by_name(
    name: str, why: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(LyapunovPruneError, match=f"{why}"):
        load_streamed(saved(make_zoo(name), tokenizer, tmp_path / "tiny"))


@pytest.mark.parametrize(("dtype", "more"), [("float32", 1.0), ("float64", 1e-3)])
def test_rows_that_depend_on_each_other_are_seen(
    dtype: str, more: float, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward: Any = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) * (1 + more * len(x)))
    with pytest.raises(LyapunovPruneError, match=r"layer 0 needs more .*depend"):
        load_streamed(checkpoint, dtype=dtype)


@pytest.mark.parametrize("name", ["granite_swa", "llama4_text"])
def test_what_a_float64_model_computes_in_float32_is_no_dependence(
    name: str, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = saved(make_zoo(name), tokenizer, tmp_path / "tiny")
    whole, apart = (made(folder, dtype="float64").model for made in (load, load_streamed))
    a, b = (lp.block_influence(model, ids % 97).influence for model in (whole, apart))
    np.testing.assert_allclose(b, a, rtol=1e-5)


def test_memory_that_is_short_is_said_before_the_run(
    checkpoint: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_streamed(checkpoint)
    monkeypatch.setattr(device, "free_memory", lambda device: 70_000)
    stream: Any = stream_of(loaded.model)
    before = stream.passes
    with pytest.raises(LyapunovPruneError, match=r"120.*76,800 bytes.*70,000"):
        lp.block_influence(loaded.model, ids)
    assert stream.passes == before
    with pytest.raises(LyapunovPruneError, match=r"largest layer need [\d,]+ bytes"):
        load_streamed(checkpoint)


def test_what_is_no_whole_set_of_safetensors_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match=r"safetensors.*streamed"):
        load_streamed("model.gguf")
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(LyapunovPruneError, match="truncated"):
        load_streamed(checkpoint)


def test_a_shard_that_is_missing_or_disappears_is_one_line(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    folder = saved(make_tiny("llama"), tokenizer, tmp_path / "tiny", max_shard_size="20KB")
    loaded = load_streamed(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / index["model.layers.4.mlp.up_proj.weight"]).unlink()
    with pytest.raises(LyapunovPruneError, match="no longer be read"):
        lp.block_influence(loaded.model, ids)
    assert held(loaded.model) == []
    with pytest.raises(LyapunovPruneError, match=r"model-.* as weights"):
        load_streamed(folder)


def overwritten(file: Path) -> None:
    save_file({name: t + 1 for name, t in load_file(file).items()}, file, {"format": "pt"})


def elsewhere(file: Path) -> None:
    save_file({name: torch.cat([t, t]) for name, t in load_file(file).items()}, file, {"format": "pt"})


def emptied(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("change", [overwritten, elsewhere, emptied])
@pytest.mark.parametrize("dtype", ["float32", "float64"])  # as the files hold it, and converted
def test_a_file_that_is_replaced_while_it_is_streamed_is_one_line(
    change: Callable[[Path], None], dtype: str, checkpoint: Path, ids: torch.Tensor
) -> None:
    loaded = load_streamed(checkpoint, dtype=dtype)
    hook = loaded.structure.layers[3].register_forward_hook(lambda *_: change(checkpoint / "model.safetensors"))
    with pytest.raises(LyapunovPruneError, match=r"no longer be read: .*model\.safetensors"):
        lp.block_influence(loaded.model, ids)
    hook.remove()
    assert held(loaded.model) == []


def test_what_is_not_finite_is_found(tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path) -> None:
    model: Any = make_tiny("llama")
    model.model.layers[3].mlp.down_proj.weight.data.fill_(float("inf"))
    apart = load_streamed(saved(model, tokenizer, tmp_path / "tiny")).model
    for measure in (lp.perplexity, lp.block_influence):
        with pytest.raises(NonFiniteError):
            measure(apart, ids)


def test_a_streamed_model_goes_with_its_stream(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = load_streamed(saved(make_tiny("llama"), tokenizer, tmp_path / "tiny")).model
    assert stream_of(copy.deepcopy(model)) is None
    kept = weakref.ref(stream_of(model))
    del model
    gc.collect()
    assert kept() is None
