"""Decoders of the zoo as transformers saves them: once for all tests of a decoder, which one process runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families.zoo import make_zoo
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def saved(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a decoder, to read only; skips one that cannot be built and saved here."""
    folders: dict[str, Path | None] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            place = tmp_path_factory.mktemp(name)
            try:
                make_zoo(name).save_pretrained(place / "saved")
                if name == "youtu":  # whose padding row is zero once it was loaded
                    AutoModelForCausalLM.from_pretrained(place / "saved").save_pretrained(place / "saved")
                tokenizer.save_pretrained(place / "saved")
                folders[name] = place / "saved"
            except Exception:
                folders[name] = None
        found = folders[name]
        if found is None:
            pytest.skip("this decoder cannot be built and saved here")
        return found

    return folder
