"""The tests by name: a new one is a function and a row here."""

from __future__ import annotations
