"""The script of the page, which sorts tables, and alone may run: nothing in a result is more than text."""

from __future__ import annotations

import base64
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_tiny
from markupsafe import escape

from lyapunov_prune.predictions import skip_divergence
from lyapunov_prune.profiles.profile import LayerProfile, profile_layers
from lyapunov_prune.ranking import angular_distance, best_removal, greedy_removal
from lyapunov_prune.report.page import POLICY, SCRIPT, write_report

pytestmark = pytest.mark.xdist_group("report")
HOSTILE = (
    "x</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">$(rm -rf ~)'"
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """One of every kind that ranks layers, of one tiny model."""
    model = make_tiny("llama")
    many = torch.randint(97, (8, 24), generator=torch.Generator().manual_seed(1))
    return {
        "profile": profile_layers(model, many[:4]),
        "divergence": skip_divergence(model, many[:2]),
        "angular": angular_distance(model, many[:2]),
        "oracle": greedy_removal(model, many[:2], 3),
        "best": best_removal(model, many, 2, search=12),
    }


@pytest.fixture
def run(results: dict[str, Any], tmp_path: Path) -> Path:
    for name, result in results.items():
        result.save(tmp_path / f"{name}.json")
    return tmp_path


class Scripts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.handlers: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def hostile(profile: LayerProfile, name: str = HOSTILE) -> LayerProfile:
    on = profile.contraction.measured_on
    on = replace(on, model=replace(on.model, name=name), text=name)
    return LayerProfile(replace(profile.contraction, measured_on=on), replace(profile.influence, measured_on=on))


def test_only_the_script_of_the_page_may_run(results: dict[str, Any], tmp_path: Path) -> None:
    hostile(results["profile"]).save(tmp_path / "profile.json")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    parser = Scripts()
    parser.feed(text)
    (code,) = parser.scripts
    assert escape(HOSTILE) in text
    assert parser.handlers == []
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert code == SCRIPT
    assert f"script-src 'sha256-{digest}'" in POLICY
    assert f'content="{escape(POLICY)}"' in text
    assert "default-src 'none'" in POLICY


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed here, so the page was NOT opened; install one (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose errors fail the test, and which may ask for nothing but the file."""
    opened = browser.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    yield opened
    opened.close()
    assert wrong == []


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_no_text_is_too_small(run: Path, browser: Any, width: int, scheme: str) -> None:
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.goto(write_report(run).as_uri())
    opened.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    smallest = """() => Math.min(...[...document.querySelectorAll("p, td, th, dd, li, code, svg text")].map((e) => {
        const drawn = e.ownerSVGElement;
        const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
        return parseFloat(getComputedStyle(e).fontSize) * scale;
    }))"""
    assert opened.evaluate(smallest) >= 11
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 20, 20)"}[scheme]
    opened.close()


def test_tables_sort_by_number_and_back(run: Path, page: Any) -> None:
    page.goto(write_report(run).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    table = page.locator("table", has=page.locator("th", has_text="influence")).first
    heads = table.locator("th").all_text_contents()
    column = next(i for i, head in enumerate(heads) if "influence" in head)

    def values() -> list[float]:
        return [float(row.locator("td").nth(column).text_content()) for row in table.locator("tbody tr").all()]

    before = values()
    table.locator("th").nth(column).click()
    assert values() == sorted(before)
    table.locator("th").nth(column).click()
    assert values() == sorted(before, reverse=True)


def test_names_are_text(results: dict[str, Any], page: Any, tmp_path: Path) -> None:
    hostile(results["profile"]).save(tmp_path / "profile.json")
    page.goto(write_report(tmp_path).as_uri())
    assert "broken" not in page.title()
    assert page.locator("img").count() == 0
    assert HOSTILE.partition("<")[0] in page.locator("body").text_content()


def test_planted_fault_a_script_that_is_not_ours_is_refused(run: Path, browser: Any) -> None:
    """The policy, not only the escaping: what gets into the page all the same does not run."""
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</body>", "<script>document.title = 'broken'</script></body>"), encoding="utf-8")
    opened = browser.new_page()
    opened.goto(path.as_uri())
    assert opened.title() != "broken"
    path.write_text(path.read_text(encoding="utf-8").replace("Content-Security-Policy", "x"), encoding="utf-8")
    opened.goto(path.as_uri())
    assert opened.title() == "broken"
    opened.close()
