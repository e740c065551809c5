"""Every planted fault is named by kind and tensor in a file of 4 bits; good files raise no alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import lyapunov_prune as lp
from experiments.planted import FAMILIES, FAULTS, Fault, averaged, each, planted, rounded, tiny, trained, with_adapters
from experiments.strange import FORMS, LATER, STRANGE, in_form, tokenizers
from lyapunov_prune.diagnosis.compared import compare
from lyapunov_prune.diagnosis.diagnose import diagnose
from lyapunov_prune.diagnosis.finding import Diagnosis
from lyapunov_prune.models.decoder import wrap

IDS = torch.randint(3, 250, (1, 48), generator=torch.Generator().manual_seed(0))
MENDED = ("biases of q, k and v by groups split as stacked", "an adapter merged three times")  # the others were found


def named(found: Diagnosis, fault: Fault, touched: list[str]) -> bool:
    right = [finding for finding in found.findings if finding.kind in fault.kinds]
    tensors = {name for finding in right for name in finding.tensors}
    return bool(right) and tensors >= set(touched) and len(right) == len(found.findings)


def changed(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    made = copy.deepcopy(model)
    each("proj|mlp.c|attn.c", lambda W: change(W) if W.ndim > 1 else W)(made)
    return made


FOUND = [*FAULTS, *STRANGE, *(fault for fault in LATER if fault.name in MENDED)]


@pytest.mark.parametrize("fault", FOUND, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_by_kind_and_tensor(fault: Fault) -> None:
    family = fault.families[FOUND.index(fault) % len(fault.families)]
    model = tiny(family)
    broken, touched = planted(model, fault)
    found = diagnose(model, rounded(broken), IDS)
    assert named(found, fault, touched), found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_file_raises_no_alarm(family: str) -> None:
    model = tiny(family)
    part = ("proj",) if family in ("phi3", "gpt2") else ("q_proj", "v_proj")
    learnt, adapted = trained(model), with_adapters(model, 0.1, part)
    honest: dict[str, Callable[[], PreTrainedModel]] = {
        "4 bits": lambda: rounded(model),
        "8 bits": lambda: rounded(model, "Q8_0"),
        "4 bits on another grid": lambda: rounded(model, "IQ4_NL"),
        "bfloat16": lambda: rounded(model, "BF16"),
        "healed": lambda: rounded(learnt),
        "its upper layers trained": lambda: trained(model, r"\.[34]\."),
        "adapters merged": lambda: rounded(adapted),
        "merged": lambda: averaged(model, [learnt, adapted]),
        "pruned by magnitude": lambda: lp.compress(model, method="magnitude", sparsity=0.5).model,
        "low rank": lambda: lp.compress(model, method="svd", rank=16).model,
        "3 bits": lambda: lp.compress(model, method="rtn", bits=3).model,
        "its masks learnt": lambda: changed(model, lambda W: W * (torch.rand_like(W) < 0.5)),
        "clipped as by AWQ": lambda: rounded(
            changed(model, lambda W: W.clamp(*(s * 0.6 * W.abs().max() for s in (-1, 1))))
        ),
    }
    # Each on every other family: half of the pairs try each file and each family.
    for what, file in list(honest.items())[list(FAMILIES).index(family) % 2 :: 2]:
        assert not diagnose(model, file(), IDS).findings, what
    if family != "gpt2":
        assert not diagnose(model, rounded(lp.remove_layers(model, [2])), IDS, kept=(0, 1, 3, 4)).findings


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_another_form_raises_no_alarm(form: str) -> None:
    model = tiny("llama")
    assert not diagnose(model, rounded(in_form(model, form)), IDS).findings


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_exchange_is_named_though_either_half_put_right_does_harm(family: str) -> None:
    fault = next(each for each in FAULTS if each.name == "gate and up exchanged")
    model = tiny(family, 11)
    broken, touched = planted(model, fault)
    found = diagnose(model, rounded(broken), IDS)
    assert named(found, fault, touched), found


def test_an_input_that_pruning_leaves_unused_raises_no_alarm() -> None:
    model = tiny("gpt2")
    pruned = lp.compress(model, method="magnitude", sparsity=0.5).model
    pruned.get_parameter("transformer.h.2.mlp.c_proj.weight").data[5] = 0  # (inputs, outputs)
    assert not diagnose(model, pruned, IDS).findings


def test_a_tokenizer_that_reads_or_ends_a_text_otherwise_is_named() -> None:
    model = tiny("llama")
    for what, kind, mine, theirs in tokenizers():
        assert not diagnose(wrap(model, mine), wrap(model, mine)).findings
        assert [each.kind for each in diagnose(wrap(model, mine), wrap(model, theirs)).findings] == [kind], what
    other = copy.deepcopy(model)
    other.generation_config.eos_token_id = 0
    assert [each.kind for each in diagnose(model, other).findings] == ["EOS"]


def test_the_share_is_that_of_the_error_and_the_model_is_as_before() -> None:
    """Everything that differs is restored, so nothing is left; the file keeps its numbers."""
    model = tiny("llama")
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight.neg_()
    before = {name: tensor.clone() for name, tensor in broken.state_dict().items()}
    (finding,) = diagnose(model, broken, IDS).findings
    assert finding.share == pytest.approx(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in broken.state_dict().items())


def test_two_models_that_are_equal_but_for_their_dtype_hold_the_same_numbers() -> None:
    model = tiny("llama").bfloat16()
    found = diagnose(model, copy.deepcopy(model).float(), IDS)
    assert not found.findings
    assert "exactly" in found.storage
    assert "bfloat16" in found.storage


def test_the_coarser_one_of_two_is_known() -> None:
    model = tiny("llama")
    assert diagnose(rounded(model), model).coarser
    assert not diagnose(model, rounded(model)).coarser


def test_explain_begins_with_the_fault_and_ends_with_one_command() -> None:
    model = tiny("llama")
    broken, _ = planted(model, FAULTS[0])
    found = lp.explain(model, rounded(broken), IDS)
    assert found.diagnosis is not None
    assert found.answer()[0] == found.diagnosis.findings[0].line()
    assert found.following().endswith("-o anew")
    assert str(found).endswith(found.next_step())


def test_swapped_sides_are_said_first_and_a_model_has_no_divergence_from_itself() -> None:
    model = tiny("llama")
    with torch.no_grad():  # a prediction that rounding can only make worse
        model.lm_head.weight.mul_(2)
    ids = model.generate(IDS[:, :4], max_new_tokens=40, do_sample=False, pad_token_id=0)
    swapped = lp.explain(rounded(model), model, ids)
    assert "wrong way round" in swapped.answer()[0]
    same = lp.explain(model, copy.deepcopy(model), ids)
    assert same.kl == 0
    assert not same.differs


def test_outliers_that_are_clipped_to_half_of_a_row_are_no_fault_of_their_column() -> None:
    W = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    W[:, 5] *= 8
    ends = 0.55 * W.abs().amax(1, keepdim=True)
    assert not len(compare(W, W.clamp(-ends, ends)).far_columns)
    assert len(compare(W, W.clamp(-0.6 * ends, 0.6 * ends)).far_columns)
