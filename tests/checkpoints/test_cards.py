"""The model card: one template, and names in it that are nothing but text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.cards import CARD as CARD_FILE
from lyapunov_prune.checkpoints.cards import as_text, write_card
from lyapunov_prune.models.cache import BUILTIN
from lyapunov_prune.models.compact import MODULE
from lyapunov_prune.results.worth import Ratio, Worth

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- lyapunov-prune
---
# small

About it.

Size of the weights: 210,816 bytes (210.8 KB, 32 bits a weight).

## Load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

No custom code is needed.

## Run

```
lyapunov-prune export path/to/this/folder -o model.gguf  # of the families that llama.cpp knows
llama-cli -m model.gguf
echo "FROM ./model.gguf" > Modelfile && ollama create my-model -f Modelfile
```

Licence and intended use are those of the original model.
"""


def written(folder: Path, *args: Any, **options: Any) -> str:
    write_card(folder, *args, **options)
    return (folder / "README.md").read_text(encoding="utf-8")


def front(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n", 2)[1])


def test_the_whole_card(llama: PreTrainedModel, tmp_path: Path) -> None:
    assert written(tmp_path, "small", "About it.", llama) == CARD


def test_what_was_measured_is_told_and_drawn_by_the_hub(llama: PreTrainedModel, tmp_path: Path) -> None:
    worth = Worth(12.5, Ratio(1.25, 1.2, 1.3), "a`b (evaluation)", 4096, "twice as fast")
    llama.config.save_pretrained(tmp_path)
    card = written(tmp_path, "small", "About it.", llama, worth=worth)
    assert worth.ratio.means() in card
    assert "a\\`b" in card
    assert "vllm serve" in card
    found = ModelCard.load(tmp_path / CARD_FILE).data.eval_results
    assert [(each.metric_type, each.metric_value) for each in found] == [("perplexity", 12.5), ("perplexity", 1.25)]
    lost = replace(worth, perplexity=math.inf, ratio=Ratio(math.inf, math.nan, math.nan))
    assert "inf" not in str(front(written(tmp_path, "small", "", llama, worth=lost)))


def test_a_card_does_not_name_an_engine_that_would_run_other_layers(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    qwen = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps({**config, **qwen, "num_hidden_layers": len(kinds)}))
    assert "vllm serve" not in written(tmp_path, "small", "", llama)


def test_sections_stand_before_the_last_line(llama: PreTrainedModel, tmp_path: Path) -> None:
    plain = written(tmp_path, "small", "About it.", llama)
    card = written(tmp_path, "small", "About it.", llama, {"A": "a", "B": "b\nc"}, tags=("more",))
    assert front(card)["tags"] == ["lyapunov-prune", "more"]
    assert card.replace("- more\n", "").replace("## A\n\na\n\n## B\n\nb\nc\n\n", "") == plain


def of(model: PreTrainedModel, source: str | Path) -> PreTrainedModel:
    """`model`, as made from `source`."""
    model.config._name_or_path = str(source)
    return model


@pytest.mark.parametrize(("name", "is_link"), [("org/model", True), ("/tmp", False), ("small", False)])
def test_the_card_links_to_a_hub_model_only(name: str, is_link: bool, llama: PreTrainedModel, tmp_path: Path) -> None:
    assert (f"base_model: {name}\n" in written(tmp_path, "small", "", of(llama, name))) is is_link


def test_a_folder_of_that_name_is_no_hub_model(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert "base_model" not in front(written(tmp_path, "small", "", of(llama, "org/model")))


def test_a_name_of_yaml_s_own_is_a_string(llama: PreTrainedModel, tmp_path: Path) -> None:
    assert front(written(tmp_path, "small", "", of(llama, "1/2")))["base_model"] == "1/2"


def test_the_built_in_model_has_its_licence(llama: PreTrainedModel, tmp_path: Path) -> None:
    card = front(written(tmp_path, "small", "", of(llama, BUILTIN)))
    assert (card["base_model"], card["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")


SOURCE_CARD = """---
license: other
license_name: gemma
license_link: https://example.org/terms
base_model: org/first
tags: [{tag}]
---
"""


@pytest.mark.parametrize(("tag", "base"), [("lyapunov-prune", "org/first"), ("merge", None)])
def test_licence_and_base_come_from_the_card_of_the_source(
    tag: str, base: str | None, llama: PreTrainedModel, tmp_path: Path
) -> None:
    """The base of a checkpoint of this program is its own base too; that of another folder is one step too far back."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / CARD_FILE).write_text(SOURCE_CARD.format(tag=tag))
    card = front(written(target, "small", "", of(llama, source)))
    assert [card[key] for key in ("license", "license_name", "license_link")] == [
        "other",
        "gemma",
        "https://example.org/terms",
    ]
    assert card.get("base_model") == base


@pytest.mark.parametrize("content", [b"", b"no front matter", b"---\n- a\n---\n", b"---\nlicense: [1\n---\n", b"\xff"])
def test_a_card_of_the_source_that_says_nothing_is_passed_over(
    content: bytes, llama: PreTrainedModel, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / CARD_FILE).write_bytes(content)
    assert set(front(written(target, "small", "", of(llama, source)))) == {"library_name", "pipeline_tag", "tags"}


def test_a_compact_checkpoint_s_card_says_that_other_engines_do_not_load_it(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / MODULE).touch()
    assert "cannot load" in " ".join(written(tmp_path, "small", "", llama).split())


def test_a_name_is_text_and_one_line() -> None:
    shown = as_text("a\n---\n# b\x1b[2J [c](http://d) `e` <f> g|h*i*&\u202e")
    assert shown.isprintable()
    assert shown == r"a\\n---\\n# b\\x1b\[2J \[c\](http://d) \`e\` \<f\> g\|h\*i\*\&\\u202e"
