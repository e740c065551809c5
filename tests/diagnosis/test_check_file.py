"""Planted faults of a file alone, each named by kind and tensor, and good files without an alarm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers import (
    MIXTURES,
    TINY,
    VOCABULARY,
    WEIGHTS,
    edit_json,
    make_mixture,
    make_tiny,
    make_tokenizer,
    saved,
    shard,
    write_gguf,
)
from packed_files import pack_others, pack_with_zero_points
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from lyapunov_prune.diagnosis import packed
from lyapunov_prune.diagnosis.check_file import FILE_TESTS, check_file
from lyapunov_prune.diagnosis.finding import Finding
from lyapunov_prune.errors import LyapunovPruneError
from lyapunov_prune.export.gguf_whole import write_gguf as export_gguf
from lyapunov_prune.models.reader import Reader
from lyapunov_prune.models.table import READERS

Change = Callable[[dict[str, torch.Tensor]], Any]
LAYER = "model.layers.{}."
DOWN, UP, OUT = (f"{LAYER}{part}.weight" for part in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj"))


def kinds(name: str | Path) -> set[str]:
    return {finding.kind for finding in check_file(str(name)).findings}


def only(name: str | Path) -> Finding:
    (finding,) = check_file(str(name)).findings
    return finding


def changed(folder: Path, change: Change) -> Path:
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


def put(tensor: torch.Tensor, where: Any, value: Any) -> None:
    tensor[where] = value


def each_norm(state: dict[str, torch.Tensor], add: float) -> None:
    for name in state:
        if "norm" in name:
            state[name] += add


# By name: the change of the tensors, the kind of the finding, and a tensor that it names.
PLANTED: dict[str, tuple[Change, str, str]] = {
    "nan": (lambda s: put(s[UP.format(3)], (5, 7), float("nan")), "non-finite", UP.format(3)),
    "infinity": (lambda s: put(s["model.norm.weight"], 2, float("inf")), "non-finite", "model.norm.weight"),
    "overflow": (
        lambda s: s.update({OUT.format(1): (s[OUT.format(1)] * 1e9).clamp(-65504, 65504).half()}),
        "overflow",
        OUT.format(1),
    ),
    "constant": (lambda s: s[OUT.format(2)].fill_(0.25), "constant", OUT.format(2)),
    "constant rows": (lambda s: put(s[UP.format(4)], slice(8, 16), 0.5), "constant", UP.format(4)),
    "zero": (lambda s: s[DOWN.format(2)].zero_(), "zero", DOWN.format(2)),
    "zero rows": (lambda s: put(s[DOWN.format(2)], slice(0, 16), 0), "zero", DOWN.format(2)),
    "zero norm": (lambda s: s["model.norm.weight"].zero_(), "zero", "model.norm.weight"),
    "same tensor": (lambda s: s.update({UP.format(2): s[UP.format(1)].clone()}), "duplicate", UP.format(2)),
    "scaled": (lambda s: s[UP.format(3)].mul_(8), "scale", UP.format(3)),
    "one number": (lambda s: put(s[UP.format(3)], (1, 1), 1e4), "scale", UP.format(3)),
    "shifted": (lambda s: s[UP.format(3)].add_(0.15), "zero point", UP.format(3)),
    "norms plus one": (lambda s: each_norm(s, 1), "shift", "model.norm.weight"),
    "norms minus one": (lambda s: each_norm(s, -1), "shift", "model.norm.weight"),
    "missing": (lambda s: s.pop(DOWN.format(5)), "missing", DOWN.format(5)),
    "shape": (lambda s: s.update({UP.format(0): s[UP.format(0)][:40]}), "shape", UP.format(0)),
    "unread": (lambda s: s.update({UP.format(0) + "2": torch.randn(3)}), "unread", UP.format(0) + "2"),
    "clipped": (lambda s: s[UP.format(1)].clamp_(-0.2, 0.2), "saturated", UP.format(1)),
    "empty EOS": (lambda s: put(s["lm_head.weight"], 2, 0), "zero", "lm_head.weight"),
    "saturated": (lambda s: s.update({DOWN.format(1): s[DOWN.format(1)].sign() * 0.15}), "saturated", DOWN.format(1)),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_a_tensor_is_named(fault: str, checkpoint: Path) -> None:
    change, kind, name = PLANTED[fault]
    changed(checkpoint, change)
    found = only(checkpoint)
    assert (found.kind, name in found.tensors) == (kind, True), found
    assert found.line()


# By name: what is done to the folder, the kind of the finding, and a word of the sentence.
BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "cut": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-10]), "truncated", "ends before"),
    "header": (lambda f: (f / WEIGHTS).write_bytes(b"x" * 100), "header", WEIGHTS),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "missing", "no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "config", "config.json is missing"),
    "config of nothing": (lambda f: edit_json(f / "config.json", model_type="nn"), "config", "nn"),
    "width": (lambda f: edit_json(f / "config.json", intermediate_size=40), "shape", "(intermediate_size 40)"),
    "vocabulary": (lambda f: edit_json(f / "config.json", vocab_size=300), "shape", "(vocab_size 300)"),
    "epsilon": (lambda f: edit_json(f / "config.json", rms_norm_eps=1.0), "config", "epsilon"),
    "eos": (lambda f: edit_json(f / "config.json", eos_token_id=[2, 260]), "token id", "260"),
    "tied": (lambda f: edit_json(f / "config.json", tie_word_embeddings=True), "tied", "lm_head.weight"),
    "template": (lambda f: (f / "chat_template.jinja").write_text("{% if %}"), "template", "cannot be read"),
    "two BOS": (
        lambda f: (f / "chat_template.jinja").write_text("{{ bos_token }}<s>{{ messages[0].content }}"),
        "template",
        "twice",
    ),
    "fewer layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=4), "unread", "layers.4"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_of_a_folder_is_named(fault: str, checkpoint: Path) -> None:
    spoil, kind, word = BROKEN[fault]
    spoil(checkpoint)
    findings = check_file(str(checkpoint)).findings
    assert any(f.kind == kind and word in f.said for f in findings), findings
    if fault in ("header", "no weights"):  # of which all others would follow
        assert len(findings) == 1


def spoil_index(folder: Path, **changes: str | None) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    for name, where in changes.items():
        if where is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = where
    file.write_text(json.dumps(index))


def test_an_index_is_held_against_its_shards(checkpoint: Path) -> None:
    shards = shard(checkpoint, make_tiny("llama", vocab_size=len(VOCABULARY)))
    assert not kinds(checkpoint)
    name = UP.format(0)
    for changes in ({name: None}, {"gone": shards[0].name}, {name: shards[-1].name}):
        kept = Path(shutil.copytree(checkpoint, checkpoint.with_name("kept"), dirs_exist_ok=True))
        spoil_index(kept, **changes)
        assert "index" in kinds(kept)
    shards[1].unlink()
    assert kinds(checkpoint) == {"index"}  # which names what is missing
    state = load_file(shards[0])
    save_file(state, shards[1], {"format": "pt"})
    assert "index" in kinds(checkpoint)


@pytest.mark.parametrize("name", [*TINY, *MIXTURES])
def test_a_good_folder_has_no_finding(name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = make_tiny(name, vocab_size=260) if name in TINY else make_mixture(name, vocab_size=260)
    saved(model, tokenizer, tmp_path)
    assert not check_file(str(tmp_path)).findings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_pruned_and_tied_model_has_no_finding(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny("gemma3", vocab_size=260, tie_word_embeddings=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter[parameter.abs() < 0.1] = 0
    saved(model.to(dtype), make_tokenizer(), tmp_path)
    assert not check_file(str(tmp_path)).findings


def round_to_three_values(state: dict[str, torch.Tensor]) -> None:
    for name, W in state.items():
        if "proj" in name:
            scale = W.abs().mean(1, keepdim=True)
            state[name] = (W / scale).round().clamp(-1, 1) * scale


@pytest.mark.parametrize(("what", "value"), [("dtype", ["F32"]), ("shape", [-1, 3]), ("shape", ["a"]), ("shape", [5])])
def test_a_header_that_describes_no_tensor(what: str, value: Any, checkpoint: Path) -> None:
    content = (checkpoint / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[UP.format(1)][what] = value
    written = json.dumps(header).encode()
    (checkpoint / WEIGHTS).write_bytes(len(written).to_bytes(8, "little") + written + content[end:])
    assert "header" in kinds(checkpoint)


def test_rows_of_three_values_are_honest(checkpoint: Path) -> None:
    assert not kinds(changed(checkpoint, round_to_three_values))


# Packed integers.


def unpack_wrong(state: dict[str, torch.Tensor], what: str) -> None:
    name = LAYER.format(2) + "mlp.up_proj.weight_scale"
    if what == "scale":
        state[name][3] = 0
    elif what == "nan":
        state[name][3] = float("nan")
    elif what == "negative":
        state[name][3] *= -1
    else:
        packed = name.replace("weight_scale", "weight_packed")
        state[packed] = torch.full_like(state[packed], 0x33333333)


@pytest.mark.parametrize(
    ("what", "kind"),
    [("", ""), ("scale", "zero scale"), ("nan", "non-finite"), ("negative", "scale"), ("same", "constant")],
)
def test_packed_integers_and_their_scales(what: str, kind: str, checkpoint: Path) -> None:
    pack_others(checkpoint)
    if what:
        changed(checkpoint, lambda state: unpack_wrong(state, what))
    assert kinds(checkpoint) == ({kind} if kind else set())


def pack_gptq(folder: Path, zero: int, **settings: Any) -> None:
    """Every matrix of the layers as GPTQ packs it: integers of 4 bits by inputs, zero points `zero` in a word."""
    state = load_file(folder / WEIGHTS)
    for name in [name for name in state if "proj" in name]:
        W, base = state.pop(name), name.removesuffix(".weight")
        scale = W.abs().amax(1) / 7
        codes = ((W / scale[:, None]).round() + 8).clamp(0, 15).to(torch.int64).T.reshape(-1, 8, len(W))
        packed = (codes << (4 * torch.arange(8))[None, :, None]).sum(1)
        state[f"{base}.qweight"] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        word = sum(zero << 4 * i for i in range(8))
        state[f"{base}.qzeros"] = torch.full((1, len(W) // 8), word - 2**32 * (word >= 2**31), dtype=torch.int32)
        state[f"{base}.scales"] = scale[None].half()
        state[f"{base}.g_idx"] = torch.zeros(W.shape[1], dtype=torch.int32)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, folder / WEIGHTS, {"format": "pt"})
    method = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False, **settings}
    edit_json(folder / "config.json", quantization_config=method)


@pytest.mark.parametrize(("format", "zero"), [("gptq", 7), ("gptq_v2", 8)])
def test_zero_points_of_the_other_convention(format: str, zero: int, checkpoint: Path, tmp_path: Path) -> None:
    pack_gptq(checkpoint, zero, checkpoint_format=format)
    assert not check_file(str(checkpoint)).findings
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[format]
    method = {"quant_method": "gptq", "bits": 4, "checkpoint_format": other}
    edit_json(checkpoint / "config.json", quantization_config=method)
    assert only(checkpoint).kind == "zero point"


def test_an_order_of_columns_that_is_none(checkpoint: Path) -> None:
    pack_gptq(checkpoint, 7)
    name = LAYER.format(1) + "mlp.up_proj.g_idx"
    changed(checkpoint, lambda state: put(state[name], 3, 5))
    assert (only(checkpoint).kind, only(checkpoint).tensors) == ("column order", (name,))


def test_an_expert_that_is_missing(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    saved(make_mixture("qwen3_moe", vocab_size=260), tokenizer, tmp_path)
    changed(tmp_path, lambda state: [state.pop(name) for name in list(state) if "layers.1.mlp.experts.3." in name])
    assert "experts" in kinds(tmp_path)
    edit_json(tmp_path / "config.json", num_local_experts=2**31 - 1, num_experts=2**31 - 1)
    assert "experts" in kinds(tmp_path)


def test_a_config_of_sizes_that_no_memory_holds_allocates_none(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda self, **options: filled.append(self))
    edit_json(checkpoint / "config.json", hidden_size=2**24)
    assert {"shape", "config"} & kinds(checkpoint)
    assert not filled


# GGUF files.


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in Q8_0."""
    model = make_tiny("llama", vocab_size=len(VOCABULARY))
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "good.gguf", packed=True)


def spoiled(good: Path, target: Path, name: str, change: Callable[[np.ndarray], Any]) -> Path:
    """A copy with the bytes of one tensor changed in place."""
    shutil.copy(good, target)
    (tensor,) = [each for each in gguf.GGUFReader(good).tensors if each.name == name]
    data = np.memmap(target, np.uint8, "r+", int(tensor.data_offset), (int(tensor.n_bytes),))
    change(data)
    data.flush()
    return target


def scales_of(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1, 34)[:, :2].view(np.float16)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda data: put(scales_of(data), 5, np.nan), "non-finite"),
        (lambda data: put(scales_of(data), slice(None), 0), "zero scale"),
        (lambda data: put(data.reshape(-1, 34), slice(None), data[:34].copy()), "constant"),
        (lambda data: put(scales_of(data), slice(None), scales_of(data) * 9), "scale"),
        (lambda data: put(data.reshape(-1, 34)[:, 2:], (slice(None), slice(None)), 127), "constant"),
    ],
)  # fmt: skip
def test_blocks_of_a_gguf_file(change: Callable[[np.ndarray], Any], kind: str, good: Path, tmp_path: Path) -> None:
    assert not check_file(str(good)).findings
    name = "blk.3.ffn_gate.weight"
    if kind == "constant":  # a first block of one value, everywhere
        before = change
        change = lambda data: (put(data[2:34], slice(None), 5), before(data))  # noqa: E731
    found = only(spoiled(good, tmp_path / "bad.gguf", name, change))
    assert (found.kind, found.tensors) == (kind, (name,))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"embedding_length": 64}, "embedding_length"),
        ({"feed_forward_length": 40}, "feed_forward_length"),
        ({"attention.head_count_kv": 4}, "head_count_kv"),
        ({"block_count": 7}, "block_count"),
        ({"block_count": 2**31 - 1}, "block_count"),
        ({"rope.dimension_count": 64}, "rope.dimension_count"),
        ({"attention.sliding_window_pattern": [1] * 7}, "sliding_window_pattern"),
    ],
)
def test_a_header_is_held_against_its_tensors(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = make_tiny("llama", vocab_size=len(VOCABULARY))
    file = write_gguf(model, tmp_path / "a.gguf", leave_out=f"{LAYER.format(2)}self_attn.k_proj.weight")
    assert kinds(file) == {"missing"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", _first_wins(values))
        file = write_gguf(model, tmp_path / "b.gguf")
    found = check_file(str(file)).findings
    assert any(f.kind == "header" and said in f.said for f in found), found


def _first_wins(values: dict[str, Any]) -> type:
    class Writer(gguf.GGUFWriter):
        """Writes `values` in place of what it is given."""

        def write_header_to_file(self, path: Path | None = None) -> None:
            for key, value in values.items():
                for held in self.kv_data:
                    held.pop(f"llama.{key}", None)
                (self.add_array if isinstance(value, list) else self.add_uint32)(f"llama.{key}", value)
            super().write_header_to_file(path)

    return Writer


def test_a_gguf_file_that_was_cut(good: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(good.read_bytes()[:-5000])
    assert "truncated" in kinds(bad)
    bad.write_bytes(good.read_bytes()[:500])
    assert only(bad).kind == "header"
    with pytest.raises(LyapunovPruneError):
        check_file(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen2"])
def test_a_gguf_file_that_this_program_writes_has_no_finding(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = make_tiny(
        name,
        vocab_size=len(VOCABULARY),
        tie_word_embeddings=name.startswith("gemma"),
        sliding_window=None if name == "qwen2" else 8,
    )
    export_gguf(model, tokenizer, tmp_path / "a.gguf", quantize="q8_0")
    assert not check_file(str(tmp_path / "a.gguf")).findings


def test_zero_points_that_are_packed_are_read(checkpoint: Path) -> None:
    """Their zero points are arbitrary there, and so is the mean."""
    pack_with_zero_points(checkpoint)
    assert kinds(checkpoint) <= {"zero point"}


def test_every_test_has_a_docstring_with_its_threshold() -> None:
    assert all("Threshold" in (test.__doc__ or "") or "Statistic" in (test.__doc__ or "") for test in FILE_TESTS)


# The command.


def test_the_command_lists_what_is_wrong_and_nothing_else(run: Callable[..., Any], run_bad: Callable[..., str]) -> None:
    done = run("check", "tiny")
    assert (done.code, done.err, done.changed) == (0, "", set())
    assert "--bounds" in run_bad("check", "tiny", "--tokens", "8")
    changed(Path("tiny"), lambda state: state.pop(DOWN.format(5)))
    done = run("check", "tiny")
    assert (done.code, done.err.count("\n"), done.changed) == (1, 1, set())
    assert DOWN.format(5) in done.out
    assert "lyapunov-prune check tiny" in run_bad("eval", "tiny", "--tokens", "16", "--context", "8")


def test_explain_lists_what_is_wrong_with_a_file_that_does_not_load(run: Callable[..., Any]) -> None:
    shutil.copytree("tiny", "bad")
    changed(Path("bad"), lambda state: state.pop(DOWN.format(5)))
    done = run("explain", "tiny", "bad", "--tokens", "32", "--context", "16")
    assert (done.code, done.err.count("\n"), done.changed) == (1, 1, set())
    assert DOWN.format(5) in done.out


def test_the_parts_of_every_reader_belong_to_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nibbles(Reader):
        parts = ("weight_q4", "weight_min")

        def unpack(self, stored: Mapping[str, torch.Tensor], name: str, module: nn.Module) -> torch.Tensor:
            return stored["weight_q4"]

    monkeypatch.setattr(packed, "READERS", {**READERS, "nibbles": Nibbles})
    packed._ends.cache_clear()
    parts = [part for reader in packed.READERS.values() for part in reader.parts]
    assert {packed.matrix_of(f"layer.q_proj.{part}") for part in parts} == {"layer.q_proj.weight"}
    packed._ends.cache_clear()
