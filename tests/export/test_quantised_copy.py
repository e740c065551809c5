"""Layers leave a quantised checkpoint by its bytes, without the kernels and libraries of its method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.test_multimodal import make_whole
from families.zoo import make_zoo
from helpers import VOCABULARY, WEIGHTS, edit_json, make_tiny, saved
from packed_kernels import write_packed_checkpoint
from quantised_files import METHODS, quantise
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export import copied, quantised_copy
from lyapunov_prune.export.quantised_copy import plan_for_quantised, prune_quantised, read_quantised
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.models import quantised_names
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.loading import load
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance

GONE, KEPT = (0, 3), (1, 2, 4, 5)


def raw(folder: Path) -> dict[str, Any]:
    """Dtype, shape and bytes of every tensor."""
    return {
        name: (t.dtype, t.shape, t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for file in folder.glob("*.safetensors")
        for name, t in load_file(file).items()
    }


def without(before: dict[str, Any], path: str, kept: tuple[int, ...], total: int) -> dict[str, Any]:
    """What is left of `before`, by renaming alone."""
    place = {f"{path}.{old}.": None if old not in kept else f"{path}.{kept.index(old)}." for old in range(total)}
    after = {}
    for name, tensor in before.items():
        old = next((each for each in place if name.startswith(each)), None)
        if old is None:
            after[name] = tensor
        elif place[old] is not None:
            after[f"{place[old]}{name.removeprefix(old)}"] = tensor
    return after


def pruned(folder: Path, target: Path, gone: tuple[int, ...] = GONE, **options: Any) -> Provenance:
    checkpoint = read_quantised(folder, folder)
    return prune_quantised(checkpoint, PruningPlan.given(checkpoint.identity, gone), target, **options)


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.fixture
def llama(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    return saved(make_tiny("llama", vocab_size=len(VOCABULARY)), tokenizer, tmp_path / "tiny")


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_of_a_layer_moves_with_it(method: str, llama: Path, tmp_path: Path) -> None:
    quantise(llama, method)
    written = pruned(llama, tmp_path / "out", shard_bytes=20_000)
    assert written.gate.passed
    assert {"same as skipping", "logits after reloading"} <= set(written.not_run)
    assert raw(tmp_path / "out") == without(raw(llama), "model.layers", KEPT, 6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == len(KEPT)
    told = json.dumps(settings(tmp_path / "out"))
    assert "layers.0.self_attn.o_proj" in told.replace("\\", "") or "(0)" in told
    assert "3" not in told.partition("o_proj")[0][-20:]
    assert (settings(llama).keys() - {"dynamic"}) <= settings(tmp_path / "out").keys()
    again = read_quantised(tmp_path / "out", tmp_path / "out")
    assert again.identity.num_layers == len(KEPT)
    pruned(tmp_path / "out", tmp_path / "twice", (1,))
    assert raw(tmp_path / "twice") == without(raw(tmp_path / "out"), "model.layers", (0, 2, 3), 4)


def test_what_kernels_run_computes_the_original_with_the_layers_skipped(
    tokenizer: PreTrainedTokenizerFast, ids: torch.Tensor, tmp_path: Path
) -> None:
    write_packed_checkpoint(make_tiny("llama", vocab_size=len(VOCABULARY)), tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    pruned(tmp_path / "tiny", tmp_path / "out")
    whole, left = (load(tmp_path / name) for name in ("tiny", "out"))
    with torch.no_grad(), skipped(whole.structure, GONE):
        wanted = whole.model(ids, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(left.model(ids, use_cache=False).logits, wanted)


def test_the_settings_of_gptq_by_layer_follow(llama: Path, tmp_path: Path) -> None:
    quantise(llama, "gptq")
    (llama / "quantize_config.json").write_text(json.dumps(settings(llama)))
    pruned(llama, tmp_path / "out")
    for told in (settings(tmp_path / "out"), json.loads((tmp_path / "out" / "quantize_config.json").read_text())):
        assert told["dynamic"] == {"-:model.layers\\.0\\.self_attn\\.o_proj": {}, "+:.*\\.2\\..*down.*": {"bits": 8}}
        assert told["modules_in_block_to_quantize"] == METHODS["gptq"][1]["modules_in_block_to_quantize"]


def test_experts_of_mxfp4_and_their_kinds_of_layers(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_zoo("gpt_oss")
    source, total = saved(model, tokenizer, tmp_path / "tiny"), model.config.num_hidden_layers
    state = {}
    for seed, (name, tensor) in enumerate(load_file(source / WEIGHTS).items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            for part in ("blocks", "scales"):
                made = torch.randint(0, 255, (2, 4, 3), generator=torch.Generator().manual_seed(seed))
                state[f"{name}_{part}"] = made.to(torch.uint8)
        else:
            state[name] = tensor
    save_file(state, source / WEIGHTS, {"format": "pt"})
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    edit_json(source / "config.json", quantization_config=told)
    pruned(source, tmp_path / "out", (0,))
    assert raw(tmp_path / "out") == without(raw(source), "model.layers", tuple(range(1, total)), total)
    assert settings(tmp_path / "out") == told
    kinds = [json.loads((f / "config.json").read_text())["layer_types"] for f in (source, tmp_path / "out")]
    assert kinds[1] == kinds[0][1:]


def test_prediction_heads_are_left_out_and_experts_named_by_number_stay(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_zoo("deepseek_v3")
    source, total = saved(model, tokenizer, tmp_path / "tiny"), model.config.num_hidden_layers
    head = f"model.layers.{total}.mlp.experts.0.up_proj"
    edit_json(source / "config.json", num_nextn_predict_layers=1)
    state = load_file(source / WEIGHTS)
    save_file(state | {f"{head}.weight": torch.zeros(2, 2)}, source / WEIGHTS, {"format": "pt"})
    quantise(source, "fp8")
    pruned(source, tmp_path / "out", (1,))
    assert f"2 of model.layers.{total}" in capsys.readouterr().err
    left = {name: t for name, t in raw(source).items() if not name.startswith(head)}
    assert raw(tmp_path / "out") == without(left, "model.layers", (0, *range(2, total)), total)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_decoder_inside_a_multimodal_model(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with quiet():
        model = make_whole("gemma3")
        source, total = saved(model, tokenizer, tmp_path / "tiny"), model.config.text_config.num_hidden_layers
    path = next(name for name in raw(source) if "layers.0." in name and "vision" not in name).partition("layers.")[0]
    quantise(source, "fp8", path)
    told = settings(source)
    told["modules_to_not_convert"] = ["vision_tower", "model.vision_tower.vision_model.encoder.layers.1.mlp"] + [
        f"model.language_model.layers.{i}.mlp.up_proj" for i in range(total)
    ]
    edit_json(source / "config.json", quantization_config=told)
    pruned(source, tmp_path / "out", (0,))
    assert raw(tmp_path / "out") == without(raw(source), f"{path}layers", tuple(range(1, total)), total)
    assert settings(tmp_path / "out")["modules_to_not_convert"] == told["modules_to_not_convert"][:-1]


# The gate: every planted fault is seen, and nothing is left.


def a_scale_of_the_wrong_layer(pieces: dict[str, Any]) -> None:
    name = "model.layers.{}.mlp.up_proj.weight_scale_inv"
    pieces[name.format(1)], pieces[name.format(2)] = pieces[name.format(2)], pieces[name.format(1)]


def one_left_over(pieces: dict[str, Any]) -> None:
    pieces["model.layers.1.mlp.up_proj.weight_scale"] = pieces["model.layers.1.mlp.up_proj.weight_scale_inv"]


def one_missing(pieces: dict[str, Any]) -> None:
    del pieces["model.layers.1.mlp.up_proj.weight_scale_inv"]


def a_gap(pieces: dict[str, Any]) -> None:
    for name in [name for name in pieces if ".layers.3." in name]:
        pieces[name.replace(".layers.3.", ".layers.4.")] = pieces.pop(name)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (a_scale_of_the_wrong_layer, r"layers\.\d\.mlp\.up_proj\.weight_scale_inv does not hold the bytes of"),
        (one_left_over, r"layers\.1\.mlp\.up_proj\.weight_scale is no tensor"),
        (one_missing, r"layers\.2\.mlp\.up_proj\.weight_scale_inv of the original is missing"),
        (a_gap, "4 layers and holds tensors of"),
    ],
)
def test_the_gate_sees_a_planted_fault(
    fault: Callable[[dict[str, Any]], None],
    message: str,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantise(llama, "fp8")
    right = quantised_copy._pieces

    def wrong(*given: Any) -> dict[str, Any]:
        pieces = right(*given)
        fault(pieces)
        return pieces

    monkeypatch.setattr(quantised_copy, "_pieces", wrong)
    with pytest.raises(CheckFailed, match=message):
        pruned(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_gate_sees_names_that_stay_behind(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantise(llama, "awq")
    monkeypatch.setattr(copied, "follow_layers", lambda *given: None)
    with pytest.raises(CheckFailed, match="name other modules of layer"):
        pruned(llama, tmp_path / "out")


# What is refused.


def test_a_pattern_that_cannot_follow_is_refused_by_its_name(llama: Path, tmp_path: Path) -> None:
    quantise(llama, "compressed-tensors")
    pattern = "re:.*layers\\.[1-4]\\.mlp"
    edit_json(llama / "config.json", quantization_config=settings(llama) | {"ignore": [pattern]})
    with pytest.raises(LyapunovPruneError) as refused:
        pruned(llama, tmp_path / "out")
    assert pattern in str(refused.value)


def test_layers_that_are_missing_are_refused(llama: Path) -> None:
    quantise(llama, "fp8")
    left = {name: t for name, t in load_file(llama / WEIGHTS).items() if ".layers.2." not in name}
    save_file(left, llama / WEIGHTS, {"format": "pt"})
    with pytest.raises(LyapunovPruneError, match="6 layers and holds tensors of 5"):
        read_quantised(llama, llama)


def test_numbers_that_change_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = saved(make_tiny("gpt2-inverse-layer", vocab_size=len(VOCABULARY)), tokenizer, tmp_path / "tiny")
    edit_json(source / "config.json", quantization_config={"quant_method": "hand-made"})
    with pytest.raises(LyapunovPruneError, match=r"copying cannot remove|computes with weights"):
        pruned(source, tmp_path / "out")


def test_a_table_that_is_quantised_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Its blocks, one for every layer, lie in another way than those of the model's own table."""
    source = saved(make_zoo("gemma3n_text"), tokenizer, tmp_path / "tiny")
    table = "model.per_layer_model_projection.weight"
    state = load_file(source / WEIGHTS)
    state[f"{table}_packed"] = state.pop(table)[:, :4].contiguous()
    save_file(state, source / WEIGHTS, {"format": "pt"})
    edit_json(source / "config.json", quantization_config={"quant_method": "hand-made"})
    with pytest.raises(LyapunovPruneError, match=f"{table}_packed is a quantised table"):
        pruned(source, tmp_path / "out", (1,))


def test_a_layer_whose_block_others_share_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = saved(make_zoo("zamba"), tokenizer, tmp_path / "tiny")
    edit_json(source / "config.json", quantization_config={"quant_method": "hand-made"})
    with pytest.raises(LyapunovPruneError, match=r"layers\.2\.shared_transf\S+ is shared"):
        pruned(source, tmp_path / "out", (2,))
    assert pruned(source, tmp_path / "out", (0, 1)).gate.passed


def test_a_plan_of_the_model_before_it_was_quantised_is_taken_and_another_is_not(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PruningPlan.given(load(llama).model, GONE)
    others = [
        make_tiny("llama", vocab_size=len(VOCABULARY), **c) for c in ({"num_hidden_layers": 5}, {"rms_norm_eps": 0.5})
    ]
    quantise(llama, "fp8")
    checkpoint = read_quantised(llama, llama)
    assert plan_for_quantised(checkpoint, plan).model == checkpoint.identity
    assert "weights were not" in capsys.readouterr().err
    for other in (*others, make_tiny("mistral", vocab_size=len(VOCABULARY))):
        with pytest.raises(LyapunovPruneError, match="this plan was made for"):
            plan_for_quantised(checkpoint, PruningPlan.given(other, (0,)))


# The command.


PRUNE = ("prune", "tiny")


@pytest.mark.parametrize("options", [["--device", "disk"], []])
def test_what_cannot_be_loaded_is_copied_and_said(
    options: list[str], checkpoint: Path, run: Callable[..., Any]
) -> None:
    quantise(checkpoint, "fp8")
    done = run(*PRUNE, "-o", "out", "--layers", "0,3", *options)
    assert (done.code, done.err) == (0, "")
    assert "the logits were not compared" in done.out
    assert options or "its weights are quantised (fp8)" in done.out
    assert raw(Path("out")) == without(raw(checkpoint), "model.layers", KEPT, 6)


def test_a_plan_file_is_taken(checkpoint: Path, run: Callable[..., Any]) -> None:
    PruningPlan.given(load(checkpoint).model, GONE).save("plan.json")
    quantise(checkpoint, "fp8")
    done = run(*PRUNE, "-o", "out", "--plan", "plan.json")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert raw(Path("out")) == without(raw(checkpoint), "model.layers", KEPT, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--remove", "2"], "--remove needs plain weights"),
        (["--layers", "1", "--dtype", "float32"], "--dtype needs plain weights"),
        (["--layers", "9"], "no layer 9"),
        (["--layers", "1", "--output", "tiny"], "tiny exists"),
    ],
)
def test_what_bytes_do_not_give_is_one_line(
    options: list[str], message: str, checkpoint: Path, run_bad: Callable[..., str]
) -> None:
    quantise(checkpoint, "fp8")
    assert message in run_bad(*PRUNE, "-o", "out", *options)


def test_settings_are_read_where_wrappers_keep_them() -> None:
    config = make_whole("gemma3").config
    config.text_config.quantization_config = {"quant_method": "fp8"}
    assert [name for _, name, _ in quantised_names.settings_of(config)] == ["quantization_config"]
