"""`rank` and `prune` by experts on the command line, and what is refused there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TEXT, VOCABULARY, Done, make_mixture
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedTokenizerFast

from lyapunov_prune import load
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.pruning.provenance import Provenance
from lyapunov_prune.pruning.removed import ExpertsGone
from lyapunov_prune.ranking.table import CRITERIA

EXPERTS = ["--what", "experts"]


@pytest.fixture
def mixture(tokenizer: PreTrainedTokenizerFast, checkpoint: Path) -> str:
    """A mixture beside the checkpoint that `run` works in."""
    folder = checkpoint.parent / "mixture"
    make_mixture("qwen3_moe", vocab_size=len(VOCABULARY)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return "mixture"


@pytest.mark.parametrize("criterion", [name for name, known in CRITERIA.items() if "experts" in known.parts])
def test_a_plan_and_a_checkpoint_without_the_same_experts(
    criterion: str, mixture: str, run: Callable[..., Done]
) -> None:
    asked = [mixture, *EXPERTS, "--remove", "25%", *TEXT]
    if criterion != "reap":  # the default
        asked += ["--criterion", criterion]
    done = run("rank", *asked, "-o", "run")
    assert (done.code, done.err.count("error")) == (0, 0)
    plan = PruningPlan.load("run/plan.json")
    assert (plan.criterion, {len(gone) for gone in plan.gone.experts.values()}) == (criterion, {2})
    assert Path("run/expert-use.json").is_file()
    assert "of the router's weight" in done.out
    done = run("prune", *asked, "-o", "out")
    assert done.code == 0, done.err
    assert "of the router's weight" in done.out
    made = Provenance.load("out/provenance.json")
    assert (made.plan.gone, made.gate.passed) == (plan.gone, True)
    assert AutoConfig.from_pretrained("out").num_local_experts == 6
    if criterion == "reap":
        assert run("prune", mixture, "--plan", "run/plan.json", "-o", "again", *TEXT).code == 0
        assert Provenance.load("again/provenance.json").plan.gone == plan.gone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--remove", "7"], "give 1 to 6"),
        (["--remove", "90%"], "give 1 to 6"),
        (["--layers", "1"], "--layers names whole layers"),
        (["--remove", "1", "--protect", "0"], "--protect "),
        (["--remove", "1", "--criterion", "bi"], "criterion bi is defined for"),
        (["--remove", "1", "--mend"], "--mend closes the gaps"),
        (["--remove", "1", "--device", "disk"], "--device disk"),
    ],
)
def test_options_that_do_not_apply_are_refused(
    options: list[str], said: str, mixture: str, run_bad: Callable[..., str]
) -> None:
    assert said in run_bad("prune", mixture, *EXPERTS, *options, "-o", "out", *TEXT)


def test_a_config_that_chooses_more_experts_than_there_are(mixture: str, run_bad: Callable[..., str]) -> None:
    """It ended in a trace."""
    path = Path(mixture) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts_per_tok": 12}))
    for command in (["profile"], ["prune", *EXPERTS, "--remove", "1", "-o", "out"]):
        assert "each token takes 12 of 8 experts" in run_bad(command[0], mixture, *command[1:], *TEXT)


def test_a_checkpoint_of_unequal_experts(mixture: str, run_bad: Callable[..., str]) -> None:
    path = Path(mixture) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if ".1.mlp.experts.7." not in name}
    save_file(kept, path, {"format": "pt"})
    assert "model.layers.1.mlp.experts" in run_bad("prune", mixture, *EXPERTS, "--remove", "1", "-o", "out", *TEXT)


def test_a_plan_that_leaves_fewer_experts_than_each_token_takes(mixture: str, run_bad: Callable[..., str]) -> None:
    model = load(mixture).model
    PruningPlan.given(model, ExpertsGone((), dict.fromkeys(range(3), tuple(range(7))))).save("plan.json")
    assert "give 1 to 6" in run_bad("prune", mixture, "--plan", "plan.json", "-o", "out", *TEXT)


def test_a_model_without_experts_is_refused_in_one_line(run_bad: Callable[..., str]) -> None:
    assert "LlamaModel has experts" in run_bad("prune", "tiny", *EXPERTS, "--remove", "1", "-o", "out", *TEXT)


def test_experts_are_ranked_and_removed_a_layer_at_a_time(mixture: str, run: Callable[..., Done]) -> None:
    ranked = [*EXPERTS, "--remove", "2", *TEXT]
    for folder, how in (("memory", []), ("streamed", ["--device", "disk"])):
        done = run("rank", mixture, *ranked, *how, "-o", folder)
        assert done.code == 0, done.err
    plans = [PruningPlan.load(f"{folder}/plan.json") for folder in ("memory", "streamed")]
    assert plans[0].gone == plans[1].gone
    done = run("prune", mixture, "--plan", "streamed/plan.json", "--device", "disk", "-o", "out")
    assert done.code == 0, done.err
    assert run("prune", mixture, "--plan", "memory/plan.json", "-o", "other", *TEXT).code == 0
    written, wanted = load_file("out/model.safetensors"), load_file("other/model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(tensor.equal(wanted[name]) for name, tensor in written.items())
    assert AutoConfig.from_pretrained("out").num_experts == 6
