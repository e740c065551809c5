"""Image classifiers come back from their folders whole, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import IMAGE_MODELS, digits, make_classifier, make_tiny, make_tokenizer
from transformers import DeiTForImageClassificationWithTeacher, PreTrainedModel, ViTModel

from lyapunov_prune import LyapunovPruneError, load
from lyapunov_prune.evaluation import score
from lyapunov_prune.export.compact import Cuts
from lyapunov_prune.export.compact_gate import write_compact
from lyapunov_prune.models import load_classifier
from lyapunov_prune.models.compact import MODULE, is_compact
from lyapunov_prune.models.loading import Normalisation

SETTINGS = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5], "image_std": [2]}


@pytest.fixture(params=list(IMAGE_MODELS))
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = make_classifier(request.param)
    model.save_pretrained(tmp_path / "plain")
    return model, tmp_path / "plain"


def test_a_classifier_comes_back_with_its_scores(plain: tuple[PreTrainedModel, Path]) -> None:
    model, folder = plain
    loaded = load_classifier(folder)
    assert type(loaded.model) is type(model)
    assert not loaded.model.training
    assert loaded.structure.num_layers == 4
    assert loaded.model.config._name_or_path == str(folder)
    assert loaded.normalisation == Normalisation()
    assert score(loaded.model, digits()).losses == pytest.approx(score(model, digits()).losses, rel=1e-6)
    assert load_classifier(folder, dtype="float64").model.dtype == torch.float64


def test_a_compact_classifier_comes_back(plain: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model, _ = plain
    cuts = Cuts((0, 3), {2: (0.1 * torch.eye(32), torch.zeros(32))})
    write_compact(model, None, cuts, tmp_path / "small")
    loaded = load_classifier(tmp_path / "small")
    assert is_compact(loaded.model)
    assert loaded.structure.model_type == model.config.model_type
    with pytest.raises(LyapunovPruneError, match="image classifier"):
        load(tmp_path / "small")
    (tmp_path / "small" / MODULE).unlink()
    with pytest.raises(LyapunovPruneError, match="the module of a compact checkpoint"):
        load_classifier(tmp_path / "small")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Normalisation((0.5,), (2.0,))),
        ({"do_normalize": False}, Normalisation()),
        ({"do_rescale": False, "image_mean": [127.5], "image_std": [51]}, Normalisation((0.5,), (0.2,))),
        ({"do_normalize": False, "rescale_factor": 2 / 255}, Normalisation((0.0,), (0.5,))),
    ],
)
def test_the_scaling_is_that_of_the_image_processor(
    change: dict[str, Any], expected: Normalisation, tmp_path: Path
) -> None:
    make_classifier("vit").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | change))
    found = load_classifier(tmp_path).normalisation
    assert found.mean == pytest.approx(expected.mean)
    assert found.deviation == pytest.approx(expected.deviation)


def test_every_channel_is_scaled_by_its_own() -> None:
    pixels = torch.rand(2, 3, 4, 5)
    scaled = Normalisation((0.1, 0.2, 0.3), (1.0, 2.0, 4.0))(pixels)
    torch.testing.assert_close(scaled[:, 2], (pixels[:, 2] - 0.3) / 4)
    assert scaled.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SETTINGS | {"image_std": [0]}, r"deviation \[0.0\], .*1 channels"),
        (SETTINGS | {"image_mean": [0.5, 0.5, 0.5]}, r"scales by mean \[0.5, 0.5, 0.5\]"),
        (SETTINGS | {"image_mean": [float("nan")]}, r"mean \[nan\]"),
        ({"do_normalize": True}, "preprocessor_config.json.*'image_mean'"),
        ([1], "preprocessor_config.json"),
    ],
)
def test_a_broken_image_processor_is_refused(settings: Any, message: str, tmp_path: Path) -> None:
    make_classifier("vit").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(LyapunovPruneError, match=message):
        load_classifier(tmp_path)


def test_text_and_images_are_not_mixed_up(plain: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    with pytest.raises(LyapunovPruneError, match="image classifier"):
        load(plain[1])
    make_tiny("llama").save_pretrained(tmp_path / "llama")
    make_tokenizer().save_pretrained(tmp_path / "llama")
    message = "holds LlamaForCausalLM, and images need"
    with pytest.raises(LyapunovPruneError, match=message):
        load_classifier(tmp_path / "llama")


def test_a_classifier_that_is_not_known_is_named(tmp_path: Path) -> None:
    DeiTForImageClassificationWithTeacher(make_classifier("deit").config).save_pretrained(tmp_path / "two-heads")
    with pytest.raises(LyapunovPruneError, match="DeiTForImageClassificationWithTeacher"):
        load_classifier(tmp_path / "two-heads")
    ViTModel(make_classifier("vit").config).save_pretrained(tmp_path / "headless")
    with pytest.raises(LyapunovPruneError, match="ViTModel"):
        load_classifier(tmp_path / "headless")


def test_a_missing_head_is_not_made_up(tmp_path: Path) -> None:
    ViTModel(make_classifier("vit").config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ViTForImageClassification"]}))
    with pytest.raises(LyapunovPruneError, match=r"lacks \d+ weights of a ViTForImageCl"):
        load_classifier(tmp_path)


def test_pickled_weights_are_not_read(plain: tuple[PreTrainedModel, Path]) -> None:
    model, folder = plain
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(LyapunovPruneError, match="only pickled weights"):
        load_classifier(folder)
