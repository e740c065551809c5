"""The model card: one template, and names in it that are nothing but text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel

from lyapunov_prune.checkpoints.cards import as_text, write_card

CARD = """---
library_name: transformers
tags:
- lyapunov-prune
---
# small

About it.

## Load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

No custom code is needed.

Licence and intended use are those of the original model.
"""


def written(folder: Path, *args: Any, **options: Any) -> str:
    write_card(folder, *args, **options)
    return (folder / "README.md").read_text(encoding="utf-8")


def front(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n", 2)[1])


def test_the_whole_card(llama: PreTrainedModel, tmp_path: Path) -> None:
    assert written(tmp_path, "small", "About it.", llama) == CARD


def test_sections_stand_before_the_last_line(llama: PreTrainedModel, tmp_path: Path) -> None:
    plain = written(tmp_path, "small", "About it.", llama)
    card = written(tmp_path, "small", "About it.", llama, {"A": "a", "B": "b\nc"}, tags=("more",))
    assert front(card)["tags"] == ["lyapunov-prune", "more"]
    assert card.replace("- more\n", "").replace("## A\n\na\n\n## B\n\nb\nc\n\n", "") == plain


@pytest.mark.parametrize(("name", "is_link"), [("org/model", True), ("/tmp", False), ("smollm2-135m", False)])
def test_the_card_links_to_a_hub_model_only(name: str, is_link: bool, llama: PreTrainedModel, tmp_path: Path) -> None:
    assert (f"base_model: {name}\n" in written(tmp_path, "small", "", llama, source=name)) is is_link


def test_a_folder_of_that_name_is_no_hub_model(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert "base_model" not in front(written(tmp_path, "small", "", llama, source="org/model"))


def test_a_name_of_yaml_s_own_is_a_string(llama: PreTrainedModel, tmp_path: Path) -> None:
    assert front(written(tmp_path, "small", "", llama, source="1/2"))["base_model"] == "1/2"


def test_a_name_is_text_and_one_line() -> None:
    shown = as_text("a\n---\n# b\x1b[2J [c](http://d) `e` <f> g|h*i*&\u202e")
    assert shown.isprintable()
    assert shown == r"a\\n---\\n# b\\x1b\[2J \[c\](http://d) \`e\` \<f\> g\|h\*i\*\&\\u202e"
