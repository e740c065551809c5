"""Numbers and tables as the pages of the experiments write them.

`written()` of a `run.py` reads the results beside it and returns Markdown by the names of the markers in the page of
its chapter (`<!-- EXPERIMENT:NAME -->` … `<!-- end -->`), which `make tables` fills.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from lyapunov_prune.evaluation.judging import compare
from lyapunov_prune.evaluation.perplexity import interval_of
from lyapunov_prune.results.result import MeasuredOn
from lyapunov_prune.results.wording import ranges


def short(x: float) -> str:
    """Three digits that count: `1,150`, `45.3`, `0.0431`; from ten million on `1.23e9`."""
    if 1e7 <= abs(x) < np.inf:
        digits, _, power = f"{x:.2e}".partition("e+")
        return f"{float(digits):g}e{int(power)}"
    return f"{float(f'{x:.3g}'):,.15g}"


def span(values: Iterable[float]) -> str:
    """Least to most, or the one value that both are: `45.3 to 704`."""
    values = list(values)
    return " to ".join(dict.fromkeys([short(min(values)), short(max(values))]))


def runs(layers: Iterable[int]) -> str:
    """Layers in order, three and more in a row as one: `0, 3 to 7, 9`; `none` for none."""
    return ranges(layers, " to ")


def counted(count: int, noun: str) -> str:
    """`1 model`, `2 models`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def bullets(*statements: str) -> str:
    """A Markdown list."""
    return "".join(f"- {statement}\n" for statement in statements)


def stated(text: str, said: str = "") -> str:
    """A statement as a sentence, begun with the verdict on the paper where the paper says something of it."""
    return f"**{said}:** {text}" if said else f"{text[0].upper()}{text[1:]}"


def verdict(holds: object, statement: str, yes: str = "Agrees", no: str = "Differs") -> str:
    """`**Agrees:** …` where what the paper says holds here too."""
    return stated(statement, yes if holds else no)


def percent(share: float) -> str:
    """`50 %`, `3.1 %`."""
    return f"{100 * share:.3g} %"


def signed(x: float) -> str:
    """`−0.44`."""
    return f"{x:+.2f}".replace("-", "−")


def correlation(statistic: float, p: float) -> str:
    """`−0.44 (p 3e-06)`; `none` where ranks have none, all being alike."""
    return f"{signed(statistic)} (p {p:.2g})" if np.isfinite(statistic) else "none"


def rank_interval(rank: float, n: int) -> tuple[float, float]:
    """95 % interval of Spearman's correlation of `n` pairs: Fisher's z, with the variance of Bonett and Wright."""
    middle, half = np.arctanh(rank), stats.norm.ppf(0.975) * np.sqrt((1 + rank**2 / 2) / (n - 3))
    return float(np.tanh(middle - half)), float(np.tanh(middle + half))


def ranked(rank: float, n: int) -> str:
    """`+0.41 (−0.09 to +0.75)`: Spearman's correlation with that interval; `none` where ranks have none."""
    if not np.isfinite(rank):
        return "none"
    low, high = rank_interval(rank, n)
    return f"{signed(rank)} ({signed(low)} to {signed(high)})"


def interval(value: float, low: float, high: float) -> str:
    """`1.82 (1.65–1.99)`; the value alone where it has no interval."""
    return f"{short(value)} ({short(low)}–{short(high)})" if np.isfinite(low) else short(value)


def mean(values: np.ndarray) -> str:
    """A mean over windows in the order of their text, with its interval (`judging.compare`)."""
    found = compare(np.zeros(len(values)), values)
    return interval(found.change, found.low, found.high)


def quotient(after: np.ndarray, before: np.ndarray) -> tuple[float, str]:
    """The mean of one over that of the other, windows in order, and with its interval: `compare`, linear in it."""
    share = float(after.mean() / before.mean())
    found = compare(share * before / before.mean(), after / before.mean())
    return share, interval(share, share + found.low, share + found.high)


def ratio(losses: np.ndarray) -> str:
    """`exp` of a mean loss a window, or of a difference of losses, with its interval over windows."""
    return interval(float(np.exp(losses.mean())), *interval_of(losses))


def measured(on: MeasuredOn, dense: float) -> str:
    """What losses were measured on, and the perplexity of the dense model there."""
    return f"Losses: {on.line()}; dense perplexity {short(dense)}.\n"


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats are written `short`, what is missing, None or NaN, as a dash."""
    lines = [map(_cell, header), ["---"] * len(header), *(map(_cell, row) for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def _cell(value: object) -> str:
    if value is None or value != value:
        return "—"
    if isinstance(value, float):
        return short(value)
    return f"{value:,}" if isinstance(value, int) else re.sub(r"(?<!\\)\|", r"\\|", str(value))
