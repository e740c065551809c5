"""Encoders: what every family of them gives for profile, rank and prune, and that the rest refuses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import SMALL, Done, edit_json, with_large_weights
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from lyapunov_prune import (
    LyapunovPruneError,
    block_influence,
    check_bounds,
    compress,
    load,
    measure_contraction,
    mend,
    perplexity,
    rank,
    remove_layers,
    verify_removal,
)
from lyapunov_prune.data.text import load_text
from lyapunov_prune.forward.logits import uncached_logits
from lyapunov_prune.models.decoder import wrap, wrap_text
from lyapunov_prune.models.encoders import is_encoder
from lyapunov_prune.models.structure import find_layers

LAYERS = 4
TINY: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
FAMILIES = (
    "bert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "esm",
    "eurobert",
    "modernbert",
    "mpnet",
    "roberta",
)


def config_of(family: str, **changes: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    return kind(**{name: value for name, value in {**TINY, **changes}.items() if name in known})


def make_encoder(family: str = "bert", auto: Any = AutoModelForMaskedLM, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return with_large_weights(auto.from_config(config_of(family, **changes)).eval())


@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModel], ids=["masked", "headless"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_is_measured_and_cut(family: str, auto: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    model = make_encoder(family, auto)
    assert is_encoder(model)
    assert len(measure_contraction(model, ids, seeds=(0,)).rho) == LAYERS
    assert len(block_influence(model, ids).influence) == LAYERS
    ranking = rank(model, ids, remove=1, protect=[0])
    assert ranking.criterion == "bi"
    removed = ranking.plan(1).remove
    pruned = remove_layers(model, removed)
    report = verify_removal(model, pruned, removed, ids)
    assert report.passed, f"\n{report}"
    assert [check.name for check in report.checks] == [
        "same as skipping",
        "reloads as saved",
        "fell by what was removed",
    ]
    pruned.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path).eval()
    assert again.config.num_hidden_layers == len(find_layers(again).layers) == LAYERS - 1
    with torch.no_grad():
        torch.testing.assert_close(uncached_logits(again, ids), uncached_logits(pruned, ids))
    layers = find_layers(pruned).layers
    layers[1], layers[2] = layers[2], layers[1]
    assert not verify_removal(model, pruned, removed, ids).passed


def test_predictions_are_compared_where_there_are_some(ids: torch.Tensor) -> None:
    masked, bare = make_encoder(), make_encoder(auto=AutoModel)
    assert len(rank(masked, ids, criterion="kl").scores) == LAYERS
    for model, criterion, why in ((bare, "kl", "no language-model head"), (masked, "best", "next token")):
        with pytest.raises(LyapunovPruneError, match=why):
            rank(model, ids, criterion=criterion, remove=1)


def test_without_its_first_norm_modernbert_has_no_first_layer() -> None:
    with pytest.raises(LyapunovPruneError, match="keep layer 0"):
        remove_layers(make_encoder("modernbert"), [0])


@pytest.mark.parametrize(
    "call",
    [
        wrap,
        lambda model, ids: wrap(wrap_text(model)),
        perplexity,
        check_bounds,
        lambda model, ids: mend(model, [1], ids),
        lambda model, ids: compress(model, ids, method="magnitude", sparsity=0.5),
    ],
)
def test_what_needs_a_causal_decoder_says_so(call: Any, ids: torch.Tensor) -> None:
    model = make_encoder()
    with pytest.raises(LyapunovPruneError, match="reads text in both directions"):
        call(model) if call is wrap else call(model, ids)


def test_a_decoder_of_such_a_family_is_none() -> None:
    config = config_of("bert", is_decoder=True)
    assert not is_encoder(transformers.BertLMHeadModel(config))
    assert wrap(transformers.BertLMHeadModel(config)).structure.num_layers == LAYERS


def test_positions_of_roberta_begin_behind_padding(ids: torch.Tensor) -> None:
    model = make_encoder("roberta")
    assert find_layers(model).max_context == 63
    block_influence(model, torch.randint(3, 97, (1, 63)))
    with pytest.raises(LyapunovPruneError, match="63"):
        block_influence(model, torch.randint(3, 97, (1, 64)))


# From files.


@pytest.fixture
def saved(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., str]:
    """Saves a model of this class, with a tokenizer."""

    def save(kind: str, family: str = "bert") -> str:
        folder = tmp_path / kind
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config_of(family, vocab_size=len(tokenizer)))
        with_large_weights(model.eval()).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertModel", "BertForSequenceClassification"])
def test_commands_take_an_encoder(
    kind: str, saved: Callable[..., str], tmp_path: Path, run: Callable[..., Done]
) -> None:
    folder, some = saved(kind), ["--tokens", "64", "--context", "16"]
    for command, *options in (["profile"], ["rank", "--remove", "1"], ["prune", "--remove", "1"]):
        done = run(command, folder, *options, *some, "-o", str(tmp_path / command))
        assert done.code == 0, done
    pruned = getattr(transformers, kind).from_pretrained(tmp_path / "prune")
    assert len(find_layers(pruned).layers) == LAYERS - 1
    assert "eval" not in done.out  # which has no loss of the next token to compare


def test_other_commands_refuse_an_encoder(saved: Callable[..., str], run_bad: Callable[..., str]) -> None:
    folder = saved("BertForMaskedLM")
    assert "both directions" in run_bad("eval", folder, "--tokens", "64", "--context", "16")
    assert "both directions" in run_bad("prune", folder, "--layers", "1", "--mend", "--context", "16", "-o", "out")


def test_heads_without_a_place_can_be_left_out(
    saved: Callable[..., str], tmp_path: Path, run: Callable[..., Done]
) -> None:
    """The first BERT holds a second head, which the class in its config has no place for."""
    folder = saved("BertForPreTraining")
    edit_json(Path(folder) / "config.json", architectures=["BertForMaskedLM"])
    command = ("--layers", "1", "--tokens", "64", "--context", "16", "-o", str(tmp_path / "pruned"))
    assert "export --text-only" in run("prune", folder, *command).err
    assert run("export", folder, "--text-only", "-o", str(tmp_path / "alone")).code == 0
    assert run("prune", str(tmp_path / "alone"), *command).code == 0


def test_an_encoder_decoder_is_refused(saved: Callable[..., str]) -> None:
    with pytest.raises(LyapunovPruneError, match="stack encoder"):
        load(saved("T5ForConditionalGeneration", "t5"))


def test_windows_begin_with_cls(tokenizer: PreTrainedTokenizerFast) -> None:
    class Encoding(type(tokenizer)):  # type: ignore[misc]
        pass

    encoder = Encoding(tokenizer_object=tokenizer.backend_tokenizer, cls_token=tokenizer.convert_ids_to_tokens(5))
    batch = load_text("builtin", encoder, tokens=64, context=16, bos=True)
    assert set(batch.ids[:, 0].tolist()) == {5}
