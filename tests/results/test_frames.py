"""pandas is there for tables, and not before."""

from __future__ import annotations

import os

import pandas
from helpers.forked import FORKED

from lyapunov_prune.results.frames import pd

MEASURED = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import lyapunov_prune as lp
shape = dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)
ranking = lp.rank(LlamaForCausalLM(LlamaConfig(**shape)), torch.randint(40, (1, 16)), criterion="rho")
assert "pandas" not in sys.modules, "imported to measure"
ranking.to_frame()
assert "pandas" in sys.modules
"""


def test_a_measurement_does_not_import_pandas_and_its_table_does() -> None:
    ((code, _, told),) = FORKED.run_together(MEASURED, [os.environ], "/")
    assert code == 0, told


def test_what_is_asked_for_is_of_pandas() -> None:
    assert pd.DataFrame is pandas.DataFrame
