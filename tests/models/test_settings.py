"""The settings that are part of a model's identity: those that change a forward, and no others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import Done, edit_json, make_tiny, moe, saved, write_gguf
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune.allocation.allocate import allocate
from lyapunov_prune.allocation.allocation import Allocation
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.forward.own_text import self_generated
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.settings import forward_settings, unknown_layer_numbers, unknown_settings
from lyapunov_prune.models.structure import identify
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.removal import remove_layers
from lyapunov_prune.results.encoding import decode, encode
from lyapunov_prune.results.store import Store

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rms_norm_eps": 0.5}),
    ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    ("mistral", {"sliding_window": 4}),
    ("qwen2", {"max_window_layers": 5, "layer_types": None}),
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gemma2", {"query_pre_attn_scalar": 2}),
    ("gemma2", {"final_logit_softcapping": 1.0}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("opt", {"activation_function": "gelu"}),
]


def again(model: PreTrainedModel, **changes: Any) -> PreTrainedModel:
    """The weights of `model` under a config with other settings."""
    settings = model.config.to_dict() | changes
    other = AutoModelForCausalLM.from_config(type(model.config)(**settings)).eval()
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


@pytest.mark.parametrize(("family", "changes"), CHANGED, ids=str)
def test_a_setting_that_changes_the_forward_is_another_model(
    family: str, changes: dict[str, Any], ids: torch.Tensor
) -> None:
    model = make_tiny(family)
    other = again(model, **changes)
    assert not torch.allclose(logits(model, ids), logits(other, ids), atol=1e-3)
    assert identify(model).weights == identify(other).weights
    assert not identify(model).same_as(identify(other))
    assert not identify(other).same_as(identify(model))
    with pytest.raises(LyapunovPruneError, match=f"its ({'|'.join(changes)}|layer_types)"):
        PruningPlan.given(model, [1]).require_model(identify(other))


def test_how_many_experts_take_part_is_part_of_the_model() -> None:
    model = moe("mixtral")
    assert not identify(model).same_as(identify(again(model, num_experts_per_tok=1)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "opt", "phi3", "qwen3", "gpt_neox"])
def test_a_setting_that_does_not_count_changes_no_forward(family: str, ids: torch.Tensor) -> None:
    model = make_tiny(family)
    counted = forward_settings(model)
    others: dict[type, Any] = {bool: True, float: 0.5, int: 3, type(None): 3}
    changes = {
        name: others[type(value)]
        for name, value in model.config.to_dict().items()
        if name not in counted
        and type(value) in others
        and not name.startswith("_")
        and name not in ("dtype", "return_dict", "output_attentions", "is_encoder_decoder")
    }
    assert {"use_cache", "pad_token_id", "eos_token_id"} <= changes.keys()
    other = again(model, **changes)
    assert torch.equal(logits(model, ids), logits(other, ids))
    assert identify(model).same_as(identify(other))


def test_a_pad_token_counts_where_positions_are_counted_from_it() -> None:
    config = transformers.RobertaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, is_decoder=True
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    other = again(model, pad_token_id=5)
    text = torch.arange(6, 16)[None]
    assert not torch.equal(logits(model, text), logits(other, text))
    assert not identify(model).same_as(identify(other))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma3", "phi3"])
def test_a_copy_on_disk_and_a_cast_are_the_same_model(
    family: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_tiny(family)
    on_disk = load(saved(model, tokenizer, tmp_path / "m")).model
    for other in (on_disk, copy.deepcopy(model).bfloat16(), copy.deepcopy(model).train()):
        assert identify(model).same_as(identify(other))


def test_a_default_that_the_file_leaves_out_is_no_difference(checkpoint: Path) -> None:
    before = identify(load(checkpoint).model)
    config = load(checkpoint).model.config
    edit_json(checkpoint / "config.json", mlp_bias=config.mlp_bias, head_dim=config.head_dim, rope_theta=10000.0)
    assert identify(load(checkpoint).model).same_as(before)


def test_a_gguf_file_and_its_copy_in_safetensors_are_the_same_model(
    reader: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LYAPUNOV_PRUNE_CACHE", str(tmp_path / "cache"))
    loaded = load(write_gguf(reader, tmp_path / "x.gguf"))
    copied = load(saved(loaded.model, loaded.tokenizer, tmp_path / "dense"))
    assert identify(loaded.model).same_as(identify(copied.model))
    assert identify(loaded.model).settings == identify(copied.model).settings


def test_a_file_that_does_not_know_the_settings_is_taken_by_its_weights(llama: PreTrainedModel) -> None:
    plan = encode(PruningPlan.given(llama, [1]))
    del plan["model"]["settings"]
    old = decode(PruningPlan, plan)
    old.require_model(identify(llama))
    old.require_model(identify(again(llama, hidden_act="gelu")))


def test_an_allocation_is_of_a_model_with_its_settings(llama: PreTrainedModel, tmp_path: Path) -> None:
    allocation = Allocation.load(allocate(llama, "uniform", 0.5).save(tmp_path / "a.json"))
    allocation.require_model(llama)
    with pytest.raises(LyapunovPruneError, match="hidden_act is gelu, not silu"):
        allocation.require_model(again(llama, hidden_act="gelu"))


def test_text_of_its_own_is_not_that_of_other_settings(llama: PreTrainedModel, tmp_path: Path) -> None:
    self_generated(llama, tokens=8, context=8, seed=0, folder=tmp_path / "jobs")
    other = again(llama, hidden_act="gelu")
    found = self_generated(other, tokens=8, context=8, seed=0, folder=tmp_path / "jobs")
    assert torch.equal(found.ids, self_generated(other, tokens=8, context=8, seed=0).ids)


def test_a_ranking_that_was_broken_off_is_not_taken_up_by_other_settings(
    run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ["rank", "tiny", "--criterion", "oracle", "--remove", "2", "-o", "run", "--tokens", "64", "--context", "32"]
    add = Store.add

    def interrupt(self: Store, key: str, value: Any) -> None:
        add(self, key, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", interrupt)
        assert run(*rank).code not in (0, 2)
    edit_json(Path("tiny/config.json"), hidden_act="gelu")
    assert run(*rank).code == 0
    found = Path("run/plan.json").read_bytes()
    assert run(*rank[:-6], "-o", "fresh", *rank[-4:]).code == 0
    assert Path("fresh/plan.json").read_bytes() == found


def test_a_plan_is_not_for_a_long_context_variant_of_its_weights(run: Callable[..., Done]) -> None:
    rank = run("rank", "tiny", "--criterion", "bi", "--remove", "1", "-o", "run", "--tokens", "64", "--context", "32")
    assert rank.code == 0
    edit_json(Path("tiny/config.json"), rope_scaling=YARN)
    done = run("prune", "tiny", "--plan", "run/plan.json", "-o", "small")
    assert done.code == 2
    assert "rope_parameters.rope_type is yarn" in done.err
    assert not Path("small").exists()
    done = run("prune", "tiny", "--device", "disk", "--plan", "run/plan.json", "-o", "small")
    assert done.code == 2
    assert "its rope_parameters" in done.err


# Settings that transformers does not know.


def test_no_setting_of_a_family_is_unknown(tiny: Callable[..., PreTrainedModel], family: str, tmp_path: Path) -> None:
    config = tiny(family).config
    config.save_pretrained(tmp_path)
    for each in (config, transformers.AutoConfig.from_pretrained(tmp_path)):
        assert unknown_settings(each).keys() <= {"intermediate_size"}  # which SMALL gives to all


def test_unknown_settings_and_numbers_of_layers() -> None:
    config = make_tiny("llama").config
    ours = {
        "drop_attn_list": [1, 4],
        "by_layer": {"0": "a", "5": "b"},
        "note": "x",
        "empty": [],
        "flags": [True, False],
    }
    ours |= {
        "layers_beyond": [2, 6],
        "layers_twice": [1, 1],
        "sizes": [2, 4],
        "head_dim": 8,
        "sliding_window": 4,
        "unused_dropout": 0.1,
    }
    for name, value in ours.items():
        setattr(config, name, value)
    unknown = {"drop_attn_list", "by_layer", "note", "empty", "flags", "layers_beyond", "layers_twice", "sizes"}
    assert unknown_settings(config).keys() == unknown
    assert unknown_layer_numbers(config, 6) == ["drop_attn_list", "by_layer"]


SMALL_TEXT = ["--tokens", "64", "--context", "32"]
CODE = {"AutoConfig": "configuration_dropped.C", "AutoModelForCausalLM": "modeling_dropped.M"}
DROPPED = {"drop_attn_list": [1, 3], "drop_mlp_list": [2], "scale_of_code": 2.0}


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "tiny", *SMALL_TEXT],
        ["eval", "tiny", "--device", "disk", *SMALL_TEXT],
        ["compress", "tiny", "--method", "magnitude", "--sparsity", "0.5", "-o", "out"],
        ["profile", "tiny", *SMALL_TEXT],
        ["prune", "tiny", "--layers", "1", "-o", "out", *SMALL_TEXT],
        ["prune", "tiny", "--layers", "1", "--device", "disk", "-o", "out"],
    ],
    ids=lambda command: " ".join(command[::2][:2]),
)
def test_code_that_is_not_run_is_named(command: list[str], run: Callable[..., Done]) -> None:
    edit_json(Path("tiny/config.json"), auto_map=CODE, **DROPPED)
    done = run(*command)
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "which is never run" in line]
    assert "names code of its own (configuration_dropped, modeling_dropped)" in line
    assert "(drop_attn_list, drop_mlp_list, scale_of_code); drop_attn_list, drop_mlp_list: numbers of layers" in line
    assert line.endswith("All numbers are those of the plain LlamaForCausalLM")


def test_numbers_of_layers_are_named_without_code_and_other_settings_are_not(run: Callable[..., Done]) -> None:
    edit_json(Path("tiny/config.json"), scale_of_code=2.0)
    assert run("eval", "tiny", *SMALL_TEXT).err == ""
    edit_json(Path("tiny/config.json"), drop_attn_list=[1, 3])
    assert "scale_of_code, drop_attn_list" in run("eval", "tiny", *SMALL_TEXT).err


@pytest.mark.parametrize("options", [[], ["--device", "disk"]], ids=" ".join)
def test_a_pruned_model_names_no_code_and_no_old_numbers(options: list[str], run: Callable[..., Done]) -> None:
    edit_json(Path("tiny/config.json"), auto_map=CODE, **DROPPED)
    reads = [] if options else SMALL_TEXT
    done = run("prune", "tiny", "--layers", "1", "-o", "out", *options, *reads)
    assert done.code == 0
    assert "drop_attn_list, drop_mlp_list" in done.err
    written = json.loads(Path("out/config.json").read_text())
    assert not written.keys() & {"drop_attn_list", "drop_mlp_list"}
    assert written["scale_of_code"] == 2.0
    assert written.get("auto_map") != CODE
    assert "error" not in run("eval", "out", *SMALL_TEXT).err


def test_a_model_in_memory_is_pruned_without_old_numbers(
    llama: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy.deepcopy(llama)
    model.config.drop_attn_list = [1, 3]
    pruned = remove_layers(model, [1])
    assert not hasattr(pruned.config, "drop_attn_list")
    assert model.config.drop_attn_list == [1, 3]
    assert "drop_attn_list" in capsys.readouterr().err
