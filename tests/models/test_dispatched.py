"""Models spread over places by accelerate: the numbers of the model in memory, bit for bit, and one-line refusals."""

from __future__ import annotations

import json
import re
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.utils.modeling as placing
import pytest
import torch
import transformers.integrations.accelerate as of_transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from helpers import LAYERS, VOCABULARY, make_tiny, make_tokenizer, tensors
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

import lyapunov_prune as lp
from lyapunov_prune.checkpoints.saving import write_model
from lyapunov_prune.compression.compress import compress
from lyapunov_prune.data.batch import TokenBatch
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.evaluation.perplexity import perplexity
from lyapunov_prune.export.pruned import write_pruned
from lyapunov_prune.healing.heal import heal
from lyapunov_prune.models.decoder import Decoder
from lyapunov_prune.models.dispatched import HeldHook, bring_weights
from lyapunov_prune.models.loading import load
from lyapunov_prune.models.structure import find_layers, identify
from lyapunov_prune.profiles.contraction import measure_contraction
from lyapunov_prune.profiles.influence import block_influence
from lyapunov_prune.pruning.plan import PruningPlan
from lyapunov_prune.ranking.rank import rank
from lyapunov_prune.sensitivity.sensitivity import measure_sensitivity

FAMILIES = ["llama", "gpt2", "gemma3"]
TEXT = ("--tokens", "64", "--context", "16", "--text", "builtin")


def some_on_disk(model: PreTrainedModel) -> dict[str, int | str]:
    """Layers 0 and 1, embeddings and head in memory, the other layers and the norm on the disk."""
    path = find_layers(model).layers_path
    places: dict[str, int | str] = {f"{path}.{i}": "cpu" if i < 2 else "disk" for i in range(LAYERS)}
    for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        if not name.startswith(f"{path}."):
            module = name.rpartition(".")[0]
            places[module] = "disk" if "norm" in module or "ln_f" in module else "cpu"
    return places


@pytest.fixture(params=FAMILIES)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Decoder, Decoder]:
    """A checkpoint loaded whole, and by a map of memory and disk."""
    model = make_tiny(request.param, vocab_size=len(VOCABULARY))
    model.save_pretrained(tmp_path / "saved")
    make_tokenizer().save_pretrained(tmp_path / "saved")
    whole, spread = load(tmp_path / "saved"), lp.load(tmp_path / "saved", device_map=some_on_disk(model))
    assert any(isinstance(getattr(m, "_hf_hook", None), HeldHook) for m in spread.model.modules())
    return whole, spread


MEASURED: dict[str, Callable[[PreTrainedModel, torch.Tensor], Any]] = {
    "logits": lambda model, ids: model(ids, use_cache=False).logits.tolist(),
    "identity": lambda model, ids: identify(model),
    "profile": lambda model, ids: measure_contraction(model, ids, seeds=(0,)).rho.tolist(),
    **{
        criterion: lambda model, ids, criterion=criterion: (
            rank(model, ids, criterion=criterion, remove=2, seeds=range(1)).to_frame().to_dict()
        )
        for criterion in ("bi", "rho", "kl", "angular", "oracle")
    },
    "perplexity": lambda model, ids: perplexity(model, ids).value,
    "sensitivity": lambda model, ids: str(measure_sensitivity(model, ids, studies=["layer"]).to_frame().to_dict()),
    "rtn": lambda model, ids: compress(model, method="rtn", bits=4).model(ids, use_cache=False).logits.tolist(),
    "wanda": lambda model, ids: (
        compress(model, ids, method="wanda", sparsity=0.5).model(ids, use_cache=False).logits.tolist()
    ),
}


def test_the_numbers_of_the_model_in_memory(both: tuple[Decoder, Decoder], ids: torch.Tensor) -> None:
    whole, spread = (loaded.model for loaded in both)
    for name, measure in MEASURED.items():
        assert str(measure(spread, ids)) == str(measure(whole, ids)), name


def test_checkpoints_of_a_dispatched_model(both: tuple[Decoder, Decoder], ids: torch.Tensor, tmp_path: Path) -> None:
    for name, loaded in zip(("whole", "spread"), both, strict=True):
        plan = PruningPlan.given(loaded.model, [1, 4])
        text = TokenBatch(ids, text="token ids", split="all", bos=None)
        written = write_pruned(loaded.model, loaded.tokenizer, plan, tmp_path / f"pruned {name}", text)
        assert written.gate.passed
        small = compress(loaded.model, method="rtn", bits=4)
        write_model(small.model, loaded.tokenizer, tmp_path / f"rounded {name}", {}, "title", "about")
    for made in ("pruned", "rounded"):
        assert tensors(tmp_path / f"{made} whole") == tensors(tmp_path / f"{made} spread")


def test_best_of_a_dispatched_model(tmp_path: Path) -> None:
    model = make_tiny("llama")
    ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(1))
    found = [
        rank(each, ids, criterion="best", remove=2, search=8).to_frame().to_dict()
        for each in (model, dispatch_model(make_tiny("llama"), some_on_disk(model), "cpu", offload_dir=tmp_path))
    ]
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("place", ["cpu", "disk", "some on disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_the_user_has_dispatched(
    place: str, dtype: torch.dtype, ids: torch.Tensor, tmp_path: Path
) -> None:
    whole, model = make_tiny("llama").to(dtype), make_tiny("llama").to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if place == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif place == "disk":
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        model = dispatch_model(model, some_on_disk(whole), main_device="cpu", offload_dir=tmp_path)
    assert any(p.is_meta for p in model.parameters())
    assert str(rank(model, ids, criterion="bi").to_frame()) == str(rank(whole, ids, criterion="bi").to_frame())
    assert not any(p.is_meta for p in model.parameters())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_write_never_reaches_the_file(tmp_path: Path) -> None:
    model: Any = make_tiny("llama")
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    bring_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(torch.tensor([[1, 2]])).logits.any()  # nor do forwards read it again
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


def test_weights_on_disk_in_another_dtype(
    both: tuple[Decoder, Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "temporary"
    written.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(written))  # other processes load their models in /tmp
    places = some_on_disk(both[0].model)
    whole, spread = (load(tmp_path / "saved", dtype="bfloat16", **more) for more in ({}, {"device_map": places}))
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(whole.model(ids).logits, spread.model(ids).logits)
    assert identify(whole.model) == identify(spread.model)
    assert not list(written.iterdir())


class Elsewhere(nn.Linear):
    """Says whether the weight is the one that is held, or another for the time of the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self)["used"] = self.weight  # by setattr it would be a parameter
        return super().forward(x)


def test_a_held_weight_is_elsewhere_for_a_forward_alone(tmp_path: Path) -> None:
    """The second device is `meta`, the only one that is everywhere: it has shapes, dtypes and no numbers."""
    model = nn.Sequential(Elsewhere(3, 3))
    layer: Any = model[0]
    weight = layer.weight.detach().clone()
    cpu_offload(model, execution_device=torch.device("cpu"))
    bring_weights(model)
    layer._hf_hook.execution_device = torch.device("meta")
    held = layer.weight
    assert model(torch.ones(1, 3, device="meta")).is_meta
    assert layer.used.is_meta
    assert layer.weight is held
    assert torch.equal(held, weight)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4, device="meta"))  # broken off
    layer._hf_hook.execution_device = torch.device("cpu")
    assert torch.equal(model(torch.ones(1, 3)), nn.functional.linear(torch.ones(1, 3), weight, layer.bias))
    assert layer.weight is held


# Several devices, without one: states that say where they are.


class Placed(torch.Tensor):
    """A state on a pretended GPU: it says so, `.to` moves it, and what mixes it with another's is refused.

    Weights are plain tensors, which are everywhere.
    """

    place: int

    @classmethod
    def at(cls, tensor: torch.Tensor, place: int) -> Placed:
        placed = tensor.detach().as_subclass(torch.Tensor).as_subclass(cls)
        placed.place = place
        return placed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Placed)]
        places = {x.place for x in flat}
        name = getattr(func, "__name__", "")
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return torch.device("cuda", flat[0].place)
        (asked,) = [x for x in args[1:2] if isinstance(x, torch.device)] or [kwargs.pop("device", None)]
        with torch._C.DisableTorchFunctionSubclass():
            if name == "to" and asked is not None:
                rest = args[2:]
                moved = func(args[0], *rest, **kwargs) if rest or kwargs else args[0].as_subclass(torch.Tensor)
                return cls.at(moved, asked.index or 0) if asked.type == "cuda" else moved.as_subclass(torch.Tensor)
            assert len(places) == 1, f"{name} mixes states on GPUs {sorted(places)}"
            result = func(*args, **kwargs)
        if name in ("cpu", "__get__", "numpy", "size", "dim"):
            return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result
        return tree_map(
            lambda x: cls.at(x.as_subclass(torch.Tensor), *places) if isinstance(x, torch.Tensor) else x, result
        )


def on_two_gpus(model: PreTrainedModel) -> PreTrainedModel:
    """As accelerate does: every layer moves what it is given, when its own forward begins, to where it is."""
    for i, layer in enumerate(find_layers(model).layers):
        module: Any = layer
        inner = module.forward

        def forward(hidden: torch.Tensor, *args: Any, inner: Any = inner, place: int = i % 2, **kwargs: Any) -> Any:
            return inner(Placed.at(hidden, place), *args, **kwargs)

        module.forward = forward
    base: Any = model.base_model
    base.layers[0].register_forward_pre_hook(lambda module, args: (Placed.at(args[0], 0), *args[1:]))
    norm = base.norm
    last = norm.forward
    norm.forward = lambda hidden: last(hidden.as_subclass(torch.Tensor))
    return model


def test_states_of_layers_on_several_gpus(ids: torch.Tensor) -> None:
    whole, spread = make_tiny("llama").eval(), on_two_gpus(make_tiny("llama").eval())
    assert str(block_influence(spread, ids).to_frame()) == str(block_influence(whole, ids).to_frame())


# Bad input.


def test_a_file_that_disappears(ids: torch.Tensor, tmp_path: Path) -> None:
    model: Any = make_tiny("llama")
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    next(tmp_path.glob("*layers.3.mlp.up_proj*.dat")).unlink()
    with pytest.raises(LyapunovPruneError, match=r"layers\.3\.mlp\.up_proj\.weight") as error:
        rank(model, ids, criterion="bi")
    assert "\n" not in str(error.value)


def test_files_that_disappear_after_loading_are_still_held(both: tuple[Decoder, Decoder], tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    for file in (tmp_path / "saved").glob("*.safetensors"):
        file.unlink()
    assert torch.equal(both[1].model(ids).logits, both[0].model(ids).logits)


def test_maps_that_cannot_be(checkpoint: Path) -> None:
    places: dict[str, int | str] = dict(some_on_disk(load(checkpoint).model))
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"device_map": {k: v for k, v in places.items() if not k.endswith("layers.3")}},
            r"gives \d+ weights no place",
        ),
        ({"device_map": {**places, "lm_head": "cuda:99"}}, "there is no device cuda:99"),
        ({"device_map": {**places, "lm_head": 99}}, "there is no device cuda:99"),
        ({"device_map": "everywhere"}, "device_map is 'everywhere'; give 'auto' or a mapping"),
        ({"device_map": "auto", "device": "mps"}, "leave out the device"),
    ]
    for given, told in wrong:
        with pytest.raises(LyapunovPruneError, match=told) as error:
            load(checkpoint, **given)
        assert "\n" not in str(error.value)


def test_no_room_for_converted_weights(
    both: tuple[Decoder, Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10, 9, 1))
    places = some_on_disk(both[0].model)
    with pytest.raises(LyapunovPruneError, match=r"bytes of disk .*TMPDIR"):
        load(tmp_path / "saved", dtype="bfloat16", device_map=places)
    load(tmp_path / "saved", device_map=places)  # as stored, nothing is written


def test_a_temporary_folder_that_cannot_be_written(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(checkpoint / "config.json"))
    with pytest.raises(LyapunovPruneError, match=r"Not a directory.*TMPDIR"):
        load(checkpoint, device_map="auto")


def test_training_is_refused(ids: torch.Tensor) -> None:
    plain = make_tiny("llama")
    spread = dispatch_model(make_tiny("llama"), dict.fromkeys(some_on_disk(plain), "cpu"), force_hooks=True)
    with pytest.raises(LyapunovPruneError, match="several places"):
        heal(spread, plain, ids, steps=1)


# From the command line.


def test_auto_on_a_machine_that_is_too_small(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("profile", "tiny", "-o", "whole", *TEXT).code == 0
    small = {"cpu": 100_000}
    for module in (placing, of_transformers):
        monkeypatch.setattr(module, "get_max_memory", lambda *args, **kwargs: dict(small))
    found = load("tiny", device_map="auto").model
    assert "disk" in found.hf_device_map.values()
    done = run("profile", "tiny", "-o", "spread", "--device", "spread", *TEXT)
    assert done.code == 0, done
    whole, spread = (json.loads(Path(f"{name}/profile.json").read_text()) for name in ("whole", "spread"))
    assert whole == spread
    assert run("prune", "tiny", "--layers", "1", "-o", "cut", "--device", "spread", *TEXT).code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("heal", "tiny", "-o", "out"), "heal .*one device"),
        (("joint", "tiny", "--remove", "1", "-o", "out"), "joint .*one device"),
    ],
)
def test_options_that_do_not_go_together(run_bad: Callable[..., str], arguments: tuple[str, ...], told: str) -> None:
    assert re.search(told, run_bad(*arguments, "--device", "spread"))
