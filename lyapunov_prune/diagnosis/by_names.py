"""Tests of what one file says of itself: names, shapes, config or header, index, tokenizer and chat template.

False alarms: none in the files that this program writes, nor in three real models; what official files are known to do
is left out, and said in the docstring of the test.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import gguf
import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

from lyapunov_prune.diagnosis.finding import AGAIN, Finding
from lyapunov_prune.diagnosis.looked import Looked, named
from lyapunov_prune.diagnosis.packed import BESIDE, COMPRESSED, GROUPED, matrix_of
from lyapunov_prune.diagnosis.stored import FileTensor, Stored, index_of
from lyapunov_prune.models.gguf_header import Header
from lyapunov_prune.models.gguf_layers import wrong_arrays
from lyapunov_prune.models.weight_files import INDEX, SINGLE
from lyapunov_prune.results.wording import ranges

_CONFIG = "copy config.json from the original checkpoint, or correct the setting"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ENDING = re.compile(r"\.(weight|bias|scale|input_scale)$")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count")
_MOST = 2**12  # layers or experts that are counted: a config may ask for more than any memory holds
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def index(file: Looked) -> Iterator[Finding]:
    """An index and shards that disagree: tensors that are nowhere, or in two files, files that are not there.

    Threshold: one tensor; for total_size 1 %, since some programs count tied tensors twice.
    """
    stored = file.stored
    if stored.folder is None:
        return
    told, fetch = index_of(stored.folder), "fetch the shards and the index again, from one version of the checkpoint"
    named_file = stored.config.get("transformers_weights")
    if not told or (named_file and named_file != INDEX):
        return
    gone = sorted({file for file in told.values() if not (stored.folder / file).is_file()})
    if (stored.folder / SINGLE).is_file() and {*told.values()} != {SINGLE}:
        if len(gone) < len({*told.values()}):
            said = (
                f"{SINGLE} and the shards of {INDEX} are both there: loading takes the one, other programs the others."
            )
            yield Finding(
                "index", (), said, "certain", "files of two versions in one folder", "move away what is not meant"
            )
        return
    if gone:
        lost = tuple(name for name, shard in told.items() if shard in gone)
        verb = "is" if len(gone) == 1 else "are"
        said = f"{INDEX} names {', '.join(gone[:3])}, which {verb} not there, with {len(lost)} tensors."
        yield Finding("index", lost, said, "certain", "a download that ended early", fetch)
    lost = tuple(name for name, shard in told.items() if shard not in gone and name not in stored.places)
    if lost:
        said = f"{INDEX} names {len(lost)} tensors that are in no file, the first `{lost[0]}`."
        yield Finding("index", lost, said, "certain", "an index of another version", fetch)
    for name, parts in stored.places.items():
        files = [part.file.name for part in parts]
        if name in told and told[name] not in (*files, *gone):
            said = f"`{name}` is in {files[0]}, and {INDEX} says {told[name]}."
            yield Finding("index", (name,), said, "certain", "a shard or an index of another version", fetch)
        elif len(files) > 1:
            said = f"`{name}` is in {len(files)} files ({', '.join(files)})."
            yield Finding("index", (name,), said, "certain", "a shard of another version that was left there", fetch)
    strays = tuple(name for name in stored.places if name not in told)
    if strays:
        said = f"{INDEX} does not name {len(strays)} tensors of the files, the first `{strays[0]}`."
        yield Finding("index", strays, said, "certain", "an index of another version", fetch)
    metadata = stored.json(INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    held = sum(part.size for parts in stored.places.values() for part in parts)
    if isinstance(total, int) and not gone and abs(total - held) > 0.01 * held:
        said = f"{INDEX} says {total:,} bytes, and the files hold {held:,}."
        yield Finding("index", (), said, "possible", "an index that was not written anew", fetch)


def config(file: Looked) -> Iterator[Finding]:
    """A config of which no model can be built, and settings that no model has.

    Threshold: what transformers refuses; an epsilon of norms outside 0 to 0.01, a rotary base below 100.
    """
    if file.expected is not None and file.expected.failure:
        yield Finding("config", (), f"No model can be built: {file.expected.failure}.", "certain", "", _CONFIG)
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
    eps = file.stored.setting(*names)
    if isinstance(eps, int | float) and not 0 < eps <= 0.01:
        yield Finding("config", (), f"The epsilon of the norms is {eps:g}.", "likely", "", _CONFIG)
    rope = file.stored.setting("rope_parameters")
    inside = rope.get("rope_theta") if isinstance(rope, dict) else None
    base = file.stored.setting("rope_theta", "rope.freq_base") or inside
    if isinstance(base, int | float) and not base >= 100:
        yield Finding("config", (), f"The base of the rotary frequencies is {base:g}.", "likely", "", _CONFIG)


def missing(file: Looked) -> Iterator[Finding]:
    """Tensors that are not there: of the config's model, or those of a layer that all others have.

    Threshold: one. In a GGUF file, a layer without a tensor that nine in ten layers have, and without another in its
    place; and the token embeddings.
    """
    stored = file.stored
    cause, remedy = "a shard that was left out, or a name that a converter did not know", AGAIN
    if file.expected is not None and file.expected.missing:
        lost = file.expected.missing
        said = f"{len(lost)} tensors are missing, the first `{lost[0]}`."
        yield Finding("missing", lost, said, "certain", cause, remedy)
    if stored.header is None:
        return
    if stored.places and "token_embd.weight" not in stored.places:
        yield Finding("missing", ("token_embd.weight",), "`token_embd.weight` is missing.", "certain", cause, remedy)
    layers: dict[int, set[str]] = {}
    for name, (part, *_) in stored.places.items():
        if part.layer is not None:
            layers.setdefault(part.layer, set()).add(name.split(".", 2)[2])
    least = min(len(layers) - 1, 0.9 * len(layers))
    usual = {what for what, n in Counter(what for some in layers.values() for what in some).items() if n >= least}
    for layer, held in sorted(layers.items()):
        if (lost := tuple(f"blk.{layer}.{what}" for what in sorted(usual - held))) and held < usual:
            said = f"Layer {layer} lacks {', '.join(f'`{name}`' for name in lost[:3])}, which the other layers have."
            yield Finding("missing", lost, said, "likely", cause, remedy)


def unread(file: Looked) -> Iterator[Finding]:
    """Tensors that no loader reads: of no part of the config's model, or of a name that llama.cpp does not know.

    Threshold: one tensor. Prediction heads, towers and tables that are known to be left out are no faults. Weights of
    methods whose further tensors are not known here are left out.
    """
    names: tuple[str, ...] = ()
    if file.expected is not None and not _foreign(file.stored):
        names = file.expected.unread
    header = file.stored.header
    if header is not None:
        arch = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture), None)
        if arch is None:
            said = f"The header names the architecture {header.architecture}, which llama.cpp does not have."
            yield Finding("header", (), said, "likely", "", AGAIN)
            return
        known = {gguf.TENSOR_NAMES[each].replace("{bid}", "*") for each in gguf.MODEL_TENSORS[arch]}
        names = tuple(name for name, (part, *_) in file.stored.places.items() if not _known(part.role, known))
    if names:
        said = f"{len(names)} tensors are read by no loader, the first `{names[0]}`."
        cause = "names of another program, or a config of another model"
        yield Finding("unread", names, said, "likely", cause, "rename them, or give the config that they belong to")


def _known(role: str, known: set[str]) -> bool:
    """Whether llama.cpp reads a tensor of this name; towers and tables of rotary factors count as read."""
    return role.startswith(("rope_", "v.", "mm.", "a.")) or _ENDING.sub("", role) in known


def _foreign(stored: Stored) -> bool:
    """Whether the weights are quantised by a method whose tensors are not known here."""
    settings = stored.setting("quantization_config", "compression_config")
    known = ("compressed-tensors", "gptq", "awq", "fp8")
    return isinstance(settings, dict) and settings.get("quant_method") not in known


def shapes(file: Looked) -> Iterator[Finding]:
    """Shapes that the config does not give: hidden size, heads, vocabulary, experts, and the parts of packed matrices.

    Threshold: any difference. Tensors that loading joins or splits are left out.
    """
    if file.expected is None:
        return
    packed = {each.name: each.shape for each in file.packed}
    odd: dict[str, list[FileTensor]] = {}
    for name, (part, *_) in file.stored.places.items():
        own = matrix_of(name)
        wanted = file.expected.shapes.get(own)
        if wanted is None or name.endswith(BESIDE) or (name == own and part.dtype in ("U8", "I8")):
            continue
        if name.endswith((COMPRESSED[0], GROUPED[0])):
            held: tuple[int, ...] = packed.get(own.removesuffix(".weight"), (0, 0))
        elif name != own:
            continue
        else:
            held = part.shape
        if held != wanted:
            odd.setdefault(_difference(file.stored, held, wanted), []).append(part)
    for said, parts in odd.items():
        cause = "a config of another size of the model, or a vocabulary that was changed in one of the two"
        yield Finding("shape", tuple(p.name for p in parts), f"{named(parts)}: {said}.", "certain", cause, _CONFIG)


def _difference(stored: Stored, held: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if held == (0, 0):
        return "its packed integers and scales do not fit each other"
    text = stored.config.get("text_config")
    settings = {**stored.config, **(text if isinstance(text, dict) else {})}
    wrong = {b for a, b in zip(held, wanted, strict=False) if a != b}
    keys = [f"{key} {value}" for key, value in settings.items() if type(value) is int and value in wrong]
    return f"{_times(held)}, and the config makes it {_times(wanted)}{f' ({keys[0]})' if keys else ''}"


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a number"


def experts(file: Looked) -> Iterator[Finding]:
    """Experts that a layer lacks, by the config or by the other layers.

    Statistic: the numbers in their names; the first axis of stacked ones is told by `shapes` and `header_keys`.
    Threshold: one. Layers may have more than the config counts, which are shared or compute nothing.
    """
    counts: dict[int | None, set[int]] = {}
    for name, (part, *_) in file.stored.places.items():
        if match := _EXPERT.search(name):
            counts.setdefault(part.layer, set()).add(int(match[1]))
    told = file.stored.setting(*_EXPERT_COUNTS)
    wanted = max([told if type(told) is int else 0, *map(len, counts.values())])
    odd = {layer: held for layer, held in counts.items() if len(held) < wanted}
    if odd:
        layer, held = next(iter(odd.items()))
        where = "" if len(odd) == 1 else f", and {len(odd) - 1} more layers lack some"
        lost = set(range(min(wanted, _MOST))) - held
        said = f"Layer {layer} lacks experts {ranges(lost)} of {wanted}{where}."
        cause = "a shard that was left out, or experts that were removed without the config"
        yield Finding("experts", (), said, "certain", cause, AGAIN)


def tied(file: Looked) -> Iterator[Finding]:
    """A config that ties two tensors which both are in the files, and differ.

    Statistic: their digests. Threshold: any difference in tensors of one shape. A head that is a copy of an embedding
    to which the config does not tie it is honest.
    """
    for a, b in file.expected.tied if file.expected is not None else ():
        first, second = file.found.get(a), file.found.get(b)
        if first and second and first.part.shape == second.part.shape and first.digest != second.digest:
            said = f"`{a}` and `{b}` differ, and the config makes them one (tie_word_embeddings)."
            remedy = "set tie_word_embeddings to false, or remove the one that is not meant"
            yield Finding("tied", (a, b), said, "likely", "a config of a version with a tied head", remedy)


def header_keys(file: Looked) -> Iterator[Finding]:
    """Keys of a GGUF header that its tensors deny: layers, widths, heads, feed-forward, experts, vocabulary, type.

    Threshold: any difference, where a key is one number and the tensor is stored as one. Latent attention and queries
    with a gate have other widths and are left out.
    """
    header = file.stored.header
    if header is None or not file.stored.places:
        return
    for key, told, held, by in _denied(header, {name: parts[0].shape for name, parts in file.stored.places.items()}):
        said = f"{key} is {told}, and `{by}` says {held}."
        yield Finding("header", (by,), said, "certain", "a header of another size of the model", AGAIN)
    for key, length in wrong_arrays(header).items() if header.read(f"{header.architecture}.block_count") else ():
        said = f"{key} has {length} values, one for each layer of another number of layers."
        yield Finding("header", (), said, "certain", "layers that were removed without the header", AGAIN)
    told, matrices = header.read("general.file_type"), [p for p, *_ in file.stored.places.values() if len(p.shape) > 1]
    names = {each.value: each.name.removeprefix("MOSTLY_").removeprefix("ALL_") for each in gguf.LlamaFileType}
    name = names.get(told, "")
    kind = next((each for each in gguf.GGMLQuantizationType if name.startswith(each.name)), None)
    if kind is None or name.startswith("IQ"):  # mixes of several types have names of their own
        return
    fitting = {p.dtype for p in matrices if p.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0}
    if fitting and not any(name.startswith(each) for each in fitting):
        said = f"general.file_type says {name}, and the matrices are {', '.join(sorted(fitting))}."
        yield Finding("header", (), said, "likely", "a header that was copied from another file", AGAIN)


def _denied(header: Header, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Any, Any, str]]:
    """Keys with their value, that of the tensors, and one of these."""
    name = header.architecture

    def told(key: str) -> int | None:
        value = header.read(f"{name}.{key}")
        return value if type(value) is int and value else None

    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for tensor, shape in shapes.items():
        found.setdefault(re.sub(r"^blk\.\d+\.", "", tensor), []).append((tensor, shape))
    count, heads = told("block_count"), told("attention.head_count")
    layers = {int(match[1]) for tensor in shapes if (match := re.match(r"blk\.(\d+)\.", tensor))}
    if count is None or len(layers) != count or layers != set(range(count)):
        lost = sorted(set(range(min(count or 0, _MOST))) - layers)
        held = f"{len(layers)} layers" + (f", without {ranges(lost)}" if lost else "")
        yield f"{name}.block_count", count, held, min(shapes)
    width, latent = told("embedding_length"), told("attention.kv_lora_rank")
    key_length = told("attention.key_length") or (width // heads if width and heads else None)
    tokens = header.values.get("tokenizer.ggml.tokens")
    rows: list[tuple[str, int | None, str, int]] = [
        (f"{name}.embedding_length", width, "token_embd.weight", -1),
        (f"{name}.embedding_length", width, "output_norm.weight", -1),
        (f"{name}.feed_forward_length", told("feed_forward_length"), "ffn_up.weight", -2),
        (f"{name}.feed_forward_length", told("feed_forward_length"), "ffn_down.weight", -1),
        (f"{name}.expert_count", told("expert_count"), "ffn_up_exps.weight", 0),
        (f"{name}.expert_count", told("expert_count"), "ffn_down_exps.weight", 0),
        (f"{name}.expert_count", told("expert_count"), "ffn_gate_inp.weight", -2),
        ("tokenizer.ggml.tokens", tokens.length if tokens is not None else None, "token_embd.weight", -2),
        ("tokenizer.ggml.tokens", tokens.length if tokens is not None else None, "output.weight", -2),
    ]
    if key_length and heads and not latent:
        rows.append((f"{name}.attention.head_count × key_length", heads * key_length, "attn_q.weight", -2))
        if kv := told("attention.head_count_kv") or heads:
            rows.append((f"{name}.attention.head_count_kv × key_length", kv * key_length, "attn_k.weight", -2))
    fused = "ffn_gate.weight" not in found  # gate and up may be one matrix of twice the rows
    for key, value, what, axis in rows:
        for tensor, shape in found.get(what, []):
            held_size = shape[axis] if -len(shape) <= axis < len(shape) else 0
            allowed = (
                {value, 2 * value}
                if value and (what == "attn_q.weight" or (fused and what == "ffn_up.weight"))
                else {value}
            )
            if value is not None and held_size not in allowed:
                yield key, value, held_size, tensor
                break
    turned = told("rope.dimension_count")
    if turned and key_length and turned > key_length and not latent:
        yield f"{name}.rope.dimension_count", turned, f"heads of {key_length}", min(shapes)
    used, experts = told("expert_used_count"), told("expert_count")
    if used and used > (experts or 0):
        yield f"{name}.expert_used_count", used, f"{experts or 0} experts", min(shapes)


def special_ids(file: Looked) -> Iterator[Finding]:
    """Special tokens whose ids are beyond the embeddings, an end of text that is an ordinary token, or of two minds.

    Threshold: one id of config, generation config, tokenizer or header. Negative ids mean none. An end of text by the
    tokenizer that neither config knows: the model never stops where its template ends a turn.
    """
    stored, rows = file.stored, file.embedding.shape[0] if file.embedding is not None else None
    told = list(_special_ids(stored))
    beyond = [(what, i) for what, i in told if rows is not None and i >= rows]
    cause = "a tokenizer or config of a version with more tokens"
    remedy = "copy tokenizer and config from the original, or embed the added tokens"
    if beyond:
        said = f"{beyond[0][0]} is {beyond[0][1]}, and there are {rows} embeddings."
        yield Finding("token id", (), said, "certain", cause, remedy)
    if stored.header is not None:
        eos, kinds = stored.header.read("tokenizer.ggml.eos_token_id"), stored.header.read("tokenizer.ggml.token_type")
        if isinstance(eos, int) and kinds and eos < len(kinds) and kinds[eos] == gguf.TokenType.NORMAL:
            said = f"tokenizer.ggml.eos_token_id is {eos}, an ordinary token of the vocabulary."
            yield Finding("token id", (), said, "likely", "an id of another vocabulary", AGAIN)
        return
    tokenizer, ids = stored.json("tokenizer.json"), _token_ids(stored)
    vocabulary = tokenizer.get("model", {}).get("vocab") if isinstance(tokenizer.get("model"), dict) else None
    if rows is not None and isinstance(vocabulary, dict) and vocabulary and max(vocabulary.values()) >= rows:
        said = f"The tokenizer has ids to {max(vocabulary.values())}, and there are {rows} embeddings."
        yield Finding("token id", (), said, "certain", cause, remedy)
    eos, known = (
        ids.get(_text(stored.json("tokenizer_config.json").get("eos_token"))),
        {i for what, i in told if "eos" in what},
    )
    if eos is not None and known and eos not in known:
        said = f"The tokenizer ends a text with id {eos}, and the configs with {', '.join(map(str, sorted(known)))}."
        yield Finding(
            "token id", (), said, "possible", "a chat model with the config of its base", "correct eos_token_id"
        )


def _special_ids(stored: Stored) -> Iterator[tuple[str, int]]:
    sources: list[tuple[str, Any]] = []
    if stored.header is not None:
        sources = [
            (key, stored.header.read(key))
            for key in stored.header.values
            if re.fullmatch(r"tokenizer\.ggml\.\w+_token_id", key)
        ]
    else:
        sources = [(f"{key} in config.json", stored.setting(key)) for key in _SPECIAL]
        generation = stored.json("generation_config.json")
        sources += [(f"{key} in generation_config.json", generation.get(key)) for key in _SPECIAL]
    for what, value in sources:
        yield from ((what, i) for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0)


def _token_ids(stored: Stored) -> dict[str, int]:
    tokenizer = stored.json("tokenizer.json")
    model, told = tokenizer.get("model"), tokenizer.get("added_tokens")
    listed = told if isinstance(told, list) else []
    added = [each for each in listed if isinstance(each, dict) and {"content", "id"} <= each.keys()]
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return ids | {each["content"]: each["id"] for each in added}


def _text(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def template(file: Looked) -> Iterator[Finding]:
    """A chat template that cannot be read, or that writes BOS twice.

    Statistic: a chat of one question, written by it. A template that writes one BOS is honest, whatever the tokenizer
    adds: Gemma's and Llama 3's do, and engines leave out the tokenizer's own.
    """
    written, bos = _template(file.stored)
    if not written:
        return
    try:
        compiled = _compile_jinja_template(written)
    except jinja2.TemplateError as error:
        said = f"The chat template cannot be read: {str(error).splitlines()[0]}."
        yield Finding("template", (), said, "certain", "", "copy the original's chat template")
        return
    chat = ""
    with suppress(Exception):  # templates refuse what they do not know
        chat = compiled.render(
            messages=[{"role": "user", "content": "a"}], bos_token=bos, eos_token="", add_generation_prompt=True
        )
    if bos and chat.lstrip().startswith(bos + bos):
        said = f"The chat template writes {bos} twice."
        yield Finding(
            "template", (), said, "certain", "a template that writes BOS by name and as text", "remove one of the two"
        )


def _template(stored: Stored) -> tuple[str, str]:
    """The chat template and the text of BOS; empty where there is none."""
    if stored.header is not None:
        bos, tokens = (
            stored.header.read("tokenizer.ggml.bos_token_id"),
            stored.header.read("tokenizer.ggml.tokens") or [],
        )
        known = isinstance(bos, int) and bos < len(tokens)
        return str(stored.header.read("tokenizer.chat_template") or ""), tokens[bos] if known else ""
    settings, written = stored.json("tokenizer_config.json"), ""
    assert stored.folder is not None
    with suppress(OSError, ValueError):
        written = (stored.folder / "chat_template.jinja").read_text(encoding="utf-8")
    told = settings.get("chat_template")
    if isinstance(told, list):
        told = next((each.get("template") for each in told if isinstance(each, dict)), "")
    return written or str(told or ""), _text(settings.get("bos_token") or "")
