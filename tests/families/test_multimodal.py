"""Every type that transformers has both a text class and a multimodal class of, and those of one class: nothing that a
checkpoint holds is lost on the way through load, prune, compress and heal, and pictures still work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families.zoo import CHANGES, VISION, settings_of
from helpers import VOCABULARY, with_large_weights
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from lyapunov_prune import load, remove_layers, verify_removal
from lyapunov_prune.checkpoints.outline import read_outline
from lyapunov_prune.checkpoints.saving import write_model
from lyapunov_prune.checkpoints.streamed import load_streamed
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.copied import prune_on_disk
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.export.streamed import compress_on_disk
from lyapunov_prune.forward.hooks import skipped
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.models.from_folder import quiet
from lyapunov_prune.models.left_out import left_out
from lyapunov_prune.models.pictures import picture_logits, picture_prompt
from lyapunov_prune.models.structure import find_structure, identify
from lyapunov_prune.pruning.gate import PICTURED
from lyapunov_prune.pruning.plan import PruningPlan

BOTH = sorted(
    kind
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(kind, name) != name
)
pytestmark = pytest.mark.xdist_group("multimodal")  # one process makes `wholes`, not each
PICTURE = 90  # the token in whose place a picture stands
_GRID = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
TOWERS: dict[str, dict[str, Any]] = {
    "dots3_note": {},
    "emu3": {
        "vq_config": {
            "codebook_size": 16,
            "embed_dim": 4,
            "latent_dim": 4,
            "base_channels": 32,
            "hidden_size": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
        },
        "vocabulary_map": {
            **{f"<|visual token {i:06d}|>": 20 + i for i in range(16)},
            "<|extra_200|>": 40,
            "<image>": PICTURE,
        },
    },
    "gemma3": {"vision_config": {"model_type": "siglip_vision_model", **VISION}, "mm_tokens_per_image": 4},
    "llama4": {
        "vision_config": {
            **VISION,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    },
    "mllama": {},
    "qwen3_5": {"vision_config": _GRID},
    "qwen3_5_moe": {"vision_config": _GRID},
    "qwen4_exp": {"vision_config": _GRID},
}
RUN = [kind for kind in TOWERS if kind != "mllama"]
ON_DISK = [kind for kind in RUN if kind != "emu3"]
NO_TEXT_CLASS = ("gemma3", "emu3")  # Emu 3 has one, which does not read the names in the files


def make_whole(kind: str) -> PreTrainedModel:
    config_class: Any = CONFIG_MAPPING[kind]
    config = config_class(**settings_of(config_class, {**CHANGES.get(kind, {}), **TOWERS[kind]}))
    text = config.get_text_config(decoder=True)
    text.vocab_size = len(VOCABULARY)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, PICTURE)
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForMultimodalLM.from_config(config).eval()
    return with_large_weights(model)


@pytest.fixture(scope="module")
def wholes(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind in TOWERS:
        folders[kind] = tmp_path_factory.mktemp(kind)
        with quiet():
            make_whole(kind).save_pretrained(folders[kind])
            tokenizer.save_pretrained(folders[kind])
    return folders


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def is_tower(name: str) -> bool:
    return not any(part in name for part in ("layers.", "lm_head", "embed_tokens", "language_model.norm")) or any(
        part in name for part in ("vis", "vq", "audio", "projector")
    )


def require_tower(folder: Path, source: Path) -> None:
    """The class of `source`, and every tensor of its tower to the last bit."""
    architectures = [json.loads((f / "config.json").read_text())["architectures"] for f in (folder, source)]
    assert architectures[0] == architectures[1]
    was, now = tensors(source), tensors(folder)
    tower = [name for name in was if is_tower(name)]
    assert len(tower) > 10
    assert all(torch.equal(was[name], now[name]) for name in tower)


def require_pictures(folder: Path, source: Path, removed: tuple[int, ...]) -> None:
    """Plain transformers gives the logits of the original with these layers skipped, a picture in the prompt."""
    with quiet():
        dense, written = (AutoModelForMultimodalLM.from_pretrained(f).eval() for f in (source, folder))
    prompt = picture_prompt(dense)
    assert prompt is not None
    with torch.no_grad(), skipped(find_structure(dense), removed):
        torch.testing.assert_close(picture_logits(written, prompt), picture_logits(dense, prompt))


def test_the_types_are_all_that_transformers_lists() -> None:
    assert set(BOTH) == set(TOWERS) - {"gemma3"}


@pytest.mark.parametrize("kind", TOWERS)
def test_a_checkpoint_is_loaded_with_its_tower(kind: str, wholes: dict[str, Path]) -> None:
    loaded = load(wholes[kind])
    assert type(loaded.model).__name__ == MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind]
    assert loaded.model.state_dict().keys() == make_whole(kind).state_dict().keys()
    assert len(loaded.structure.layers) == 8
    head: Any = loaded.model.get_output_embeddings()
    assert all(module is not head for module in loaded.structure.backbone.modules())


@pytest.mark.parametrize("kind", TOWERS)
def test_the_text_alone_is_loaded_on_request_and_what_is_left_out_named(
    kind: str, wholes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if kind in NO_TEXT_CLASS:
        with pytest.raises(LyapunovPruneError, match="text_only") as error:
            load(wholes[kind], text_only=True)
        assert "\n" not in str(error.value)
        return
    model = load(wholes[kind], text_only=True).model
    assert type(model).__name__ == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    left = left_out(model)
    assert left is not None
    assert left.parts == left.names
    assert len(left.taken) + len(left.names) == len(tensors(wholes[kind]))
    assert "left out: as asked" in capsys.readouterr().err


@pytest.mark.parametrize("kind", RUN)
def test_pruned_in_memory_the_tower_stays_and_pictures_work(kind: str, wholes: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(wholes[kind])
    done = write_pruned(loaded.model, loaded.tokenizer, PruningPlan.given(loaded.model, [2]), tmp_path / "out")
    (check,) = [check for check in done.gate.checks if check.name == PICTURED]
    assert check.detail.startswith("logits with a picture in the prompt")
    require_tower(tmp_path / "out", wholes[kind])
    require_pictures(tmp_path / "out", wholes[kind], (2,))
    load(tmp_path / "out")


@pytest.mark.parametrize("kind", ON_DISK)
def test_pruned_on_disk_the_tower_stays_and_pictures_work(kind: str, wholes: dict[str, Path], tmp_path: Path) -> None:
    outline = read_outline(wholes[kind], wholes[kind])
    plan = PruningPlan.given(load(wholes[kind]).model, [2])  # one model, in memory and on disk
    assert PICTURED in prune_on_disk(outline, plan, tmp_path / "out").not_run
    require_tower(tmp_path / "out", wholes[kind])
    require_pictures(tmp_path / "out", wholes[kind], (2,))


@pytest.mark.parametrize("kind", ["llama4", "qwen3_5"])
def test_pruned_by_streaming_a_picture_is_compared(kind: str, wholes: dict[str, Path], tmp_path: Path) -> None:
    outline = read_outline(wholes[kind], wholes[kind])
    done = prune_on_disk(outline, PruningPlan.given(outline.identity, [2]), tmp_path / "out", stream=True)
    assert PICTURED in {check.name for check in done.gate.checks}
    require_tower(tmp_path / "out", wholes[kind])


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "qwen3_5"])
def test_streamed_it_is_the_model_in_memory(kind: str, wholes: dict[str, Path]) -> None:
    streamed, loaded = load_streamed(wholes[kind]), load(wholes[kind])
    assert identify(streamed.model).same_as(identify(loaded.model))
    prompt = picture_prompt(loaded.model)
    assert prompt is not None
    with torch.no_grad():
        # Where weights lie in memory decides how a CPU adds: the promise is equality up to rounding.
        torch.testing.assert_close(picture_logits(streamed.model, prompt), picture_logits(loaded.model, prompt))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_compressed_and_healed_the_tower_stays(kind: str, wholes: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(wholes[kind])
    ids = torch.randint(3, 20, (4, 16), generator=torch.Generator().manual_seed(0))
    done = compress(loaded.model, method="magnitude", sparsity=0.5)
    write_model(done.model, loaded.tokenizer, tmp_path / "compressed", {}, "small", "About it.")
    streamed = load_streamed(wholes[kind])
    compress_on_disk(streamed.model, streamed.tokenizer, tmp_path / "streamed", method="magnitude", sparsity=0.5)
    healed = heal(remove_layers(loaded.model, [2]), loaded.model, ids.repeat(2, 1), steps=2)
    write_model(healed.model, loaded.tokenizer, tmp_path / "healed", {}, "small", "About it.")
    for name in ("compressed", "streamed", "healed"):
        require_tower(tmp_path / name, wholes[kind])
    compressed, again = (tensors(tmp_path / name) for name in ("compressed", "streamed"))
    assert compressed.keys() == again.keys()
    assert all(torch.equal(compressed[name], again[name]) for name in compressed)


@pytest.mark.parametrize("kind", ["llama4", "qwen3_5"])
def test_pruned_as_text_alone_the_class_is_that_of_the_text(kind: str, wholes: dict[str, Path], tmp_path: Path) -> None:
    loaded, outline = load(wholes[kind], text_only=True), read_outline(wholes[kind], wholes[kind], text_only=True)
    write_pruned(loaded.model, loaded.tokenizer, PruningPlan.given(loaded.model, [2]), tmp_path / "memory")
    prune_on_disk(outline, PruningPlan.given(loaded.model, [2]), tmp_path / "disk")
    for name in ("memory", "disk"):
        written = load(tmp_path / name)
        assert type(written.model).__name__ == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        assert not any("vis" in key for key in tensors(tmp_path / name))


def test_planted_fault_a_tower_that_changed_is_seen(wholes: dict[str, Path]) -> None:
    model: Any = load(wholes["qwen3_5"]).model
    pruned: Any = remove_layers(model, [2])
    assert verify_removal(model, pruned, [2]).passed
    with torch.no_grad():
        pruned.model.visual.blocks[0].mlp.linear_fc1.bias[0] += 1e-3
    report = verify_removal(model, pruned, [2])
    assert PICTURED in report.failure()
    assert "model.visual.blocks.0.mlp.linear_fc1.bias" in report.failure()


def test_planted_fault_a_picture_that_reaches_another_layer_is_seen(wholes: dict[str, Path]) -> None:
    model: Any = load(wholes["qwen3_5"]).model
    pruned: Any = remove_layers(model, [2])
    pruned.config.image_token_id = PICTURE - 1
    assert PICTURED in verify_removal(model, pruned, [2]).failure()


def test_a_wrapper_whose_layers_run_on_pictures_alone_is_refused(wholes: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(wholes["mllama"])
    with pytest.raises(LyapunovPruneError, match="run only when there is an image"):
        write_pruned(loaded.model, loaded.tokenizer, PruningPlan.given(loaded.model, [2]), tmp_path / "out")


def test_a_tower_that_is_missing_is_not_made_up(wholes: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(wholes["qwen3_5"], text_only=True)
    loaded.model.save_pretrained(tmp_path / "text")
    loaded.tokenizer.save_pretrained(tmp_path / "text")
    config = json.loads((wholes["qwen3_5"] / "config.json").read_text())
    (tmp_path / "text" / "config.json").write_text(json.dumps(config))
    with pytest.raises(LyapunovPruneError, match=r"33 weights .*export --text-only"):
        load(tmp_path / "text")
