"""A program that runs llama.cpp on token ids and writes its predictions. It imports nothing of this package.

It calls the C functions of the library that xllamacpp ships, because xllamacpp's own server gives no log-probabilities
of a prompt. Settings structs are passed as blocks of bytes larger than those of any version. Only the first three
numbers of the context settings are written (context, batch, micro-batch); llama.cpp's own getters check them.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

_ERROR = 4  # ggml's log level of errors


class _Settings(ctypes.Structure):
    _fields_ = (("words", c_uint32 * 512),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("number", c_int32),
        ("token", POINTER(c_int32)),
        ("embedding", c_void_p),
        ("position", POINTER(c_int32)),
        ("sequences", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))),
        ("wanted", POINTER(c_int8)),
    )


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_Settings, []),
    "llama_context_default_params": (_Settings, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _Settings]),
    "llama_init_from_model": (c_void_p, [c_void_p, _Settings]),
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_n_batch": (c_uint32, [c_void_p]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_model_n_swa": (c_int32, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, ctypes.c_bool]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [c_void_p, _Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
}


@ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
def _told(level: int, text: bytes, _: Any) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode("utf-8", "replace"))


def _library() -> ctypes.CDLL:
    import xllamacpp

    (file,) = [each for each in Path(xllamacpp.__file__).parent.iterdir() if each.suffix in (".so", ".pyd")]
    library = ctypes.CDLL(str(file))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_told, None)
    library.llama_backend_init()
    return library


class Model:
    """A GGUF file in llama.cpp, for texts of up to `length` tokens, read `batch` at a time."""

    def __init__(self, library: ctypes.CDLL, file: str, length: int, batch: int, threads: int) -> None:
        self.library, self.size = library, batch
        model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
        if not model:
            sys.exit(f"error: llama.cpp does not load {file}")
        settings = library.llama_context_default_params()
        settings.words[0], settings.words[1], settings.words[2] = length, batch, batch
        self.context = library.llama_init_from_model(model, settings)
        if not self.context:
            sys.exit(f"error: llama.cpp makes no context for {file}")
        got = (library.llama_n_batch(self.context), library.llama_n_ubatch(self.context))
        if got != (batch, batch) or library.llama_n_ctx(self.context) < length:
            sys.exit("error: this version of xllamacpp has its settings in other places; install another one")
        library.llama_set_n_threads(self.context, threads, threads)
        self.window = library.llama_model_n_swa(model)
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self.batch = library.llama_batch_init(batch, 0, 1)

    def clear(self) -> None:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def read(self, ids: list[int], start: int, every: bool) -> int:
        """Read at most one batch of `ids` from position `start` on, and return how many tokens were read.

        Logits are computed for every token, or without `every` for the last one alone.
        """
        batch = self.batch
        batch.number = number = min(len(ids), self.size)
        for i, token in enumerate(ids[:number]):
            batch.token[i], batch.position[i], batch.sequences[i], batch.sequence[i][0] = token, start + i, 1, 0
            batch.wanted[i] = every or i == number - 1
        if self.library.llama_decode(self.context, batch):
            sys.exit("error: llama.cpp cannot read the tokens")
        return number

    def log_probabilities(self, i: int) -> np.ndarray:
        """Log-probabilities (vocabulary,) float32, after token `i` of the batch that was read last."""
        logits = np.ctypeslib.as_array(self.library.llama_get_logits_ith(self.context, i), (self.vocabulary,))
        shifted = logits - logits.max()
        return shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))


def predictions(model: Model, ids: list[int], greedy: int, top: int) -> dict[str, np.ndarray]:
    """What `model` predicts after every token of `ids` and of the `greedy` tokens that it writes after them.

    The arrays are the fields of `llama_cpp.Predictions`.
    """
    model.clear()
    ids, start, length = list(ids), 0, len(ids) + greedy
    after, tokens, values = [], [], []
    while start < length - 1:  # what follows the last token is not needed
        number = model.read(ids[start:], start, every=True)
        for i in range(start, start + number):
            found = model.log_probabilities(i - start)
            best = np.argpartition(found, -top)[-top:]
            best = best[np.argsort(found[best])[::-1]]
            tokens.append(best)
            values.append(found[best])
            if i + 1 == len(ids) < length:
                ids.append(int(best[0]))
            if i + 1 < len(ids):
                after.append(found[ids[i + 1]])
        start += number
    made = {"ids": ids, "next": after, "tokens": tokens[: length - 1], "values": values[: length - 1]}
    return {name: np.asarray(each) for name, each in made.items()}


def seconds(model: Model, ids: list[int], prompt: int) -> list[float]:
    """Seconds for the first `prompt` tokens of `ids` together, and for each of the others by itself."""
    model.clear()
    marks, start = [time.perf_counter()], 0
    while start < prompt:
        start += model.read(ids[start:prompt], start, every=False)
    for _ in ids[prompt:]:
        model.library.llama_synchronize(model.context)
        marks.append(time.perf_counter())
        start += model.read(ids[start : start + 1], start, every=False)
    model.library.llama_synchronize(model.context)
    return np.diff([*marks, time.perf_counter()]).tolist()


def run(asked: str, told: str) -> None:
    """Answer the questions in the JSON file `asked`; the answers in `told` (.npz) are written whole or not at all."""
    wanted = json.loads(Path(asked).read_text(encoding="utf-8"))
    windows, timed = wanted["windows"], wanted["timed"]
    longest = max(map(len, [*windows, timed])) + wanted["greedy"]
    length = max(longest, wanted["batch"])  # else llama.cpp takes a smaller batch
    library, models = _library(), []
    found: dict[str, Any] = {}
    for file in wanted["files"]:
        models.append(Model(library, file, length, wanted["batch"], wanted["threads"]))
    for i, model in enumerate(models):
        found[f"{i}.window"] = model.window
        for k, ids in enumerate(windows):
            made = predictions(model, ids, wanted["greedy"], wanted["top"])
            found |= {f"{i}.{k}.{name}": values for name, values in made.items()}
    for turn in range(wanted["repeats"] + 1):
        for i, model in enumerate(models):
            took = seconds(model, timed, wanted["prompt"]) if wanted["repeats"] else []
            if turn:  # the first round warms up
                found[f"{i}.seconds.{turn - 1}"] = np.asarray(took)
    partial = Path(f"{told}.partial")
    with partial.open("wb") as out:
        np.savez(out, **found)
    partial.rename(told)


if __name__ == "__main__":
    run(*sys.argv[1:])
