"""A compact checkpoint: written whole or not at all, loaded by this package and by transformers without it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import change_weight, edit_json, make_classifier
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, PreTrainedModel, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import lyapunov_prune
from lyapunov_prune.checkpoints.cards import write_card
from lyapunov_prune.checkpoints.reloading import GateCheck
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import CheckFailed, LyapunovPruneError
from lyapunov_prune.export.compact import Cuts, make_compact
from lyapunov_prune.export.compact_gate import save_compact
from lyapunov_prune.models import modeling_compact
from lyapunov_prune.models.compact import MODULE, register
from lyapunov_prune.models.decoder import wrap, wrap_any
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import identify
from lyapunov_prune.results.history import history_of
from lyapunov_prune.results.result import MeasuredOn

pytestmark = pytest.mark.xdist_group("compact")  # one process writes `written`, not each

W = 0.2 * torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
CUTS = Cuts(attention=(0, 3), merged={1: (W, torch.ones(32)), 3: (W.T, None)})
TEXT = ("--text", "builtin", "--tokens", "256", "--context", "64")
FIVE = {"same as skipping", "cached decoding", "reloads as saved", "reloads without this package"}


@pytest.fixture(scope="module")
def written(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """With all five checks, the process without this package among them."""
    folder = tmp_path_factory.mktemp("compact") / "small"
    compact = make_compact(reader, CUTS)
    gate = save_compact(folder, wrap(reader), compact, tokenizer, CUTS, None)
    assert {check.name for check in gate.checks} == FIVE | {"fell by what was removed"}
    write_card(folder, "small", "Cut.", compact, {})
    return folder


@pytest.fixture
def small(written: Path, tmp_path: Path) -> Path:
    """`written` in a folder that a test may spoil, and that commands find."""
    return Path(shutil.copytree(written, tmp_path / "small"))


# What is written.


def test_the_folder(written: Path, reader: PreTrainedModel) -> None:
    config = json.loads((written / "config.json").read_text())
    assert config["model_type"] == "compact_llama"
    assert config["cuts"][3] == {"self_attn": "none", "input_layernorm": "identity", "mlp": "linear"}
    assert config["auto_map"] == {
        "AutoConfig": "modeling_compact.CompactLlamaConfig",
        "AutoModelForCausalLM": "modeling_compact.CompactLlama",
    }
    assert (written / MODULE).read_bytes() == Path(modeling_compact.__file__).read_bytes()
    sizes = [sum(t.nbytes for t in tensors) for tensors in (load_file(written / "model.safetensors").values(),)]
    assert sizes == [4 * make_compact(reader, CUTS).num_parameters()]


def test_the_card_says_what_loading_runs(written: Path) -> None:
    card = (written / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder", trust_remote_code=True)' in card
    assert f"This runs `{MODULE}`" in card
    assert "No custom code" not in card


def test_the_module_imports_torch_and_transformers_alone() -> None:
    lines = Path(modeling_compact.__file__).read_text().splitlines()
    imported = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}


def test_a_classifier_is_written_and_loads_without_this_package(tmp_path: Path) -> None:
    model = make_classifier("vit")
    compact = make_compact(model, CUTS)
    gate = save_compact(tmp_path / "small", wrap_any(model), compact, None, CUTS, None)
    write_card(tmp_path / "small", "small", "Cut.", compact, {})
    assert "reloads without this package" in [check.name for check in gate.checks if check.passed]
    register("vit")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "small", trust_remote_code=False)
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(again.eval()(images).logits, make_compact(model, CUTS)(images).logits)
    card = (tmp_path / "small" / "README.md").read_text()
    assert 'AutoModelForImageClassification.from_pretrained("path/to/this/folder", trust_remote_code=True)' in card
    assert "AutoTokenizer" not in card


def test_a_model_with_other_cuts_fails_the_gate(
    reader: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_compact(reader, Cuts(merged={2: CUTS.merged[1]}))
    passed = GateCheck("reloads without this package", True, 0.0, 1.0, "not run: it takes seconds")
    monkeypatch.setattr("lyapunov_prune.export.compact_gate.elsewhere_check", lambda *_: passed)
    with pytest.raises(CheckFailed, match="same as skipping"):
        save_compact(tmp_path / "small", wrap(reader), other, tokenizer, Cuts(merged={1: CUTS.merged[1]}), None)


def test_the_history_knows_the_text(
    reader: PreTrainedModel, ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast
) -> None:
    seen: MeasuredOn = TokenBatch(ids, "a book", "calibration", False).measured_on(reader)
    made = make_compact(reader, Cuts((1,), measured_on=(seen,)))
    assert [step.saw for step in history_of(made).steps] == [(seen,)]


# Loading it.


def test_load_gives_what_was_written(small: Path, reader: PreTrainedModel) -> None:
    loaded = load(small)
    assert type(loaded.model) is modeling_compact.CompactLlama
    assert loaded.structure.model_type == "llama"
    assert identify(loaded.model).weights == identify(make_compact(reader, CUTS)).weights
    assert loaded.tokenizer("the").input_ids
    assert [step.kind for step in history_of(loaded.model).steps] == ["prune"]


def test_no_code_of_the_folder_is_run(small: Path) -> None:
    ran = small / "ran"
    (small / MODULE).write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit")
    assert type(load(small).model) is modeling_compact.CompactLlama
    assert not ran.exists()


def test_what_was_loaded_is_written_again_with_its_module(small: Path, tmp_path: Path) -> None:
    load(small).model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / MODULE).read_bytes() == (small / MODULE).read_bytes()


def test_a_model_of_the_folders_code_is_refused_to_be_cut(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    theirs = get_class_from_dynamic_module("modeling_compact.CompactLlama", written)
    model = theirs.from_pretrained(written)
    with pytest.raises(LyapunovPruneError, match="code from its folder"):
        make_compact(model, Cuts((1,)))


def without_module(folder: Path) -> None:
    (folder / MODULE).unlink()


def cuts_of_another_layer(folder: Path) -> None:
    cuts = json.loads((folder / "config.json").read_text())["cuts"]
    edit_json(folder / "config.json", cuts=[*cuts[1:], cuts[0]])


def one_cut_too_many(folder: Path) -> None:
    cuts = json.loads((folder / "config.json").read_text())["cuts"]
    edit_json(folder / "config.json", cuts=[*cuts[:5], cuts[0]])


def cuts_of_five_layers(folder: Path) -> None:
    edit_json(folder / "config.json", cuts=[{}] * 5)


def unknown_form(folder: Path) -> None:
    edit_json(folder / "config.json", cuts=[{"mlp": "torch.hub.load"}] + [{}] * 5)


def no_list(folder: Path) -> None:
    edit_json(folder / "config.json", cuts=None)


def labelled_plain(folder: Path) -> None:
    """transformers would make up what is missing, and only warn."""
    edit_json(folder / "config.json", model_type="llama")


def another_shape(folder: Path) -> None:
    change_weight(folder, "model.layers.1.mlp.weight", torch.zeros(32, 31))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (without_module, f"has no {MODULE}, the module of a compact checkpoint"),
        (cuts_of_another_layer, "CompactLlama"),
        (one_cut_too_many, r"model\.layers\.5\.input_layernorm\.weight, which its config cuts out"),
        (cuts_of_five_layers, "5 layers, and the model has 6"),
        (unknown_form, "torch.hub.load"),
        (no_list, "cannot load "),
        (labelled_plain, "weights of a LlamaForCausalLM"),
        (another_shape, r"another shape \(model.layers.1.mlp.weight\)"),
    ],
)
def test_a_spoilt_folder_is_refused(small: Path, fault: Callable[[Path], None], message: str) -> None:
    fault(small)
    with pytest.raises(LyapunovPruneError, match=message) as refused:
        lyapunov_prune.load(small)
    assert "\n" not in str(refused.value)
