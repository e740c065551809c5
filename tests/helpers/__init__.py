"""What several test files use, by idea: one module each."""

# ruff: noqa: F403
from __future__ import annotations

from helpers.checkpoint_files import *
from helpers.command_line import *
from helpers.definitions import *
from helpers.observed import *
from helpers.results import *
from helpers.tiny_models import *
