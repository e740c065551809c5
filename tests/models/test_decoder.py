"""The handle: found once, taken by every public function in the place of a model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import torch
from helpers import VOCABULARY, make_classifier, make_tiny, saved
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel, PreTrainedTokenizerFast

import lyapunov_prune as lp
from lyapunov_prune import LyapunovPruneError
from lyapunov_prune.arguments import Parsed, fits
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.models.decoder import Decoder, Model, model_of, takes_model, wrap, wrap_any
from lyapunov_prune.models.plain import plain
from lyapunov_prune.models.structure import find_structure, identify, in_eval_mode
from lyapunov_prune.results.encoding import encode


def test_a_handle_holds_what_is_found_out_about_a_model(llama: PreTrainedModel) -> None:
    decoder = lp.wrap(llama)
    assert decoder.structure == find_structure(llama)
    assert decoder.identity == identify(llama)
    assert (decoder.model, decoder.tokenizer, decoder.stream) == (llama, None, None)
    assert (decoder.packed, decoder.wrapped) == (False, False)
    assert wrap(decoder) is decoder
    assert model_of(decoder) is model_of(llama) is llama


def test_a_handle_and_a_batch_print_in_one_line(ids: torch.Tensor) -> None:
    decoder = wrap(make_tiny("llama"))  # other tests name the one that all share
    assert repr(decoder).startswith(f"LlamaForCausalLM (llama): {len(decoder.layers)} layers, ")
    batch = TokenBatch(ids, "mine", "all", None)
    assert repr(batch) == f"{ids.shape[0]} × {ids.shape[1]} tokens of mine (all)"


def test_the_identity_is_that_of_the_weights_as_they_are_now() -> None:
    decoder = wrap(make_tiny("llama"))
    before = decoder.identity
    with torch.no_grad():
        decoder.layers[0].mlp.up_proj.weight[0, 0] += 1  # type: ignore[union-attr, index, operator]
    assert decoder.identity.weights != before.weights


def test_what_is_loaded_is_a_handle(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = saved(make_tiny("llama", vocab_size=len(VOCABULARY)), tokenizer, tmp_path / "tiny")
    whole, apart = lp.load(folder), lp.load_streamed(folder)
    assert isinstance(whole, Decoder)
    assert (whole.stream is None, apart.stream is None) == (True, False)
    assert whole.tokenizer.get_vocab() == apart.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert wrap(apart.model).stream is apart.stream
    with pytest.raises(LyapunovPruneError, match="read from disk"):
        plain(apart)


def test_what_is_no_decoder_has_no_handle() -> None:
    classifier = make_classifier("vit")
    with pytest.raises(LyapunovPruneError, match="ViTForImageClassification"):
        wrap(classifier)
    assert len(wrap_any(classifier).layers) == classifier.config.num_hidden_layers
    with pytest.raises(LyapunovPruneError, match="BertModel"):
        wrap(BertModel(BertConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1)))


def test_a_measurement_puts_the_model_of_a_handle_in_eval_mode(llama: PreTrainedModel) -> None:
    decoder, seen = wrap(llama.train()), list[bool]()
    in_eval_mode(lambda given: seen.append(given.model.training))(decoder)
    assert (seen, llama.training) == ([False], True)
    llama.eval()


def names_a_model(hint: Any) -> bool:
    """Whether an annotation allows a model, by itself or in a mapping."""
    is_model = isinstance(hint, type) and issubclass(hint, nn.Module)
    parsed = [each.kind for each in getattr(hint, "__metadata__", ()) if isinstance(each, Parsed)]
    return is_model or any(map(names_a_model, (*get_args(hint), *parsed)))


@pytest.mark.parametrize("name", lp.__all__)
def test_every_public_function_takes_a_handle_for_a_model(name: str, llama: PreTrainedModel) -> None:
    function = getattr(lp, name)
    if not inspect.isfunction(function):
        return
    decoder = wrap(llama)
    for key, hint in get_type_hints(inspect.unwrap(function), include_extras=True).items():
        if key not in ("return", "change") and names_a_model(hint):
            for given in (decoder, llama):
                assert fits(given, hint) or fits({"model": given}, hint), f"{name}: {key}"


_PARSED: list[Any] = []


def _opened(given: Any) -> Decoder:
    _PARSED.append(given)
    return wrap(given)


@takes_model
def _handed(model: Annotated[Decoder, Parsed(Model, _opened)], times: int) -> Decoder:
    return model


def test_the_function_gets_the_handle_once_all_arguments_match(llama: PreTrainedModel) -> None:
    decoder = wrap(llama)
    assert _handed(decoder, 1) is decoder
    assert _handed(llama, 1).structure == decoder.structure
    with pytest.raises(LyapunovPruneError, match="times is 'x'"):
        _handed(llama, "x")  # type: ignore[arg-type]
    with pytest.raises(LyapunovPruneError, match="model is 3; give PreTrainedModel or Decoder"):
        _handed(3, 1)  # type: ignore[arg-type]
    assert [decoder, llama] == _PARSED


def test_a_handle_gives_the_numbers_of_its_model(llama: PreTrainedModel, ids: torch.Tensor) -> None:
    decoder = wrap(llama)
    assert encode(lp.perplexity(decoder, ids)) == encode(lp.perplexity(llama, ids))
    pruned = lp.remove_layers(decoder, [1, 3])
    assert lp.verify_removal(decoder, wrap(pruned), [1, 3], ids) == lp.verify_removal(llama, pruned, [1, 3], ids)
