"""The part of the page that answers: what it says is what the results say, and nothing in them is more than text."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LAYERS, make_tiny
from markupsafe import escape

from lyapunov_prune import rank_layers, remove_layers
from lyapunov_prune.predictions import skip_divergence
from lyapunov_prune.profiles.profile import LayerProfile, profile_layers
from lyapunov_prune.pruning.curve import RemovalCurve, evaluate_removals
from lyapunov_prune.ranking import angular_distance, best_removal, greedy_removal
from lyapunov_prune.report.page import write_report
from lyapunov_prune.report.questions import POLICY, SCRIPT, questions

pytestmark = pytest.mark.xdist_group("report")
HOSTILE = (
    "x</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">$(rm -rf ~)'"
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """One of every kind that ranks layers or knows a perplexity, of one tiny model."""
    model = make_tiny("llama")
    many = torch.randint(97, (8, 24), generator=torch.Generator().manual_seed(1))
    profile = profile_layers(model, many[:4])
    plans = [rank_layers(profile.contraction, profile.influence).plan(n) for n in (1, 2)]
    return {
        "profile": profile,
        "divergence": skip_divergence(model, many[:2]),
        "angular": angular_distance(model, many[:2]),
        "oracle": greedy_removal(model, many[:2], 3),
        "best": best_removal(model, many, 2, search=12),
        "removal": evaluate_removals(model, {"bi": plans}, many[4:]),
    }


@pytest.fixture
def run(results: dict[str, Any], tmp_path: Path) -> Path:
    for name, result in results.items():
        result.save(tmp_path / f"{name}.json")
    return tmp_path


def data_of(found: dict[str, Any] | None) -> dict[str, Any]:
    """As the script reads it."""
    assert found is not None
    return json.loads(json.dumps(found, allow_nan=False))


def test_the_answers_are_those_of_the_results(results: dict[str, Any]) -> None:
    data = data_of(questions(results.values()))
    profile = results["profile"]
    assert set(data["criteria"]) == {"bi", "blend", "rho", "kl", "angular", "oracle", "best"}
    for name in ("bi", "blend", "rho"):
        ranking = rank_layers(profile.contraction, profile.influence, criterion=name)
        assert ranking.picked is not None
        for n in range(1, LAYERS):
            assert data["criteria"][name]["sets"][str(n)] == sorted(ranking.plan(n).remove)
            np.testing.assert_allclose(data["criteria"][name]["picked"][str(n)], ranking.picked[n - 1], atol=1e-3)
        np.testing.assert_array_equal(data["criteria"][name]["scores"], ranking.scores)
    assert data["criteria"]["angular"]["sets"]["2"] == sorted(results["angular"].plan(2).remove)
    assert set(data["criteria"]["oracle"]["sets"]) == {"1", "2", "3"}
    assert data["criteria"]["best"]["sets"] == {"2": sorted(results["best"].remove)}
    np.testing.assert_array_equal(data["divergence"], results["divergence"].variance)


def test_what_is_known_is_over_the_dense_model(results: dict[str, Any]) -> None:
    data = data_of(questions(results.values()))
    removal = results["removal"]
    physical = [row for row in data["known"] if row["text"].startswith("cut, ")]
    assert [row["times"] for row in physical] == [row.degradation for row in removal.rows[1:]]
    tried = [row for row in data["known"] if row["text"].startswith("on the windows that checked it")]
    assert len(tried) == len(results["best"].tried)
    small = remove_layers(make_tiny("llama"), [0, 1])
    assert data["parameters"] - 2 * data["layer"] == sum(p.numel() for p in small.parameters())


def test_what_became_of_a_cut_model_is_named_and_told_once(results: dict[str, Any]) -> None:
    curve: RemovalCurve = results["removal"]
    cut = replace(curve.rows[2], criterion="cut")
    states = {"mended": 0.9, "mended, healed 3 steps": 0.8}
    healed = [replace(cut, criterion=name, degradation=times * cut.degradation) for name, times in states.items()]
    recovery = replace(curve, rows=(curve.dense, cut, *healed))
    known = data_of(questions([results["profile"], curve, recovery]))["known"]
    on = curve.measured_on.line()
    mine = [(row["text"], row["mended"]) for row in known if row["layers"] == sorted(cut.removed)]
    assert mine == [(f"cut, {on}", False), *((f"{name}, {on}", True) for name in states)]


def test_it_starts_at_the_plan_that_was_made(results: dict[str, Any]) -> None:
    profile = results["profile"]
    plan = rank_layers(profile.contraction, profile.influence, criterion="rho").plan(3)
    by_hand = replace(plan, criterion="given")
    assert data_of(questions([profile], [by_hand, plan]))["start"] == {"criterion": "rho", "count": 3}
    assert data_of(questions([profile], [by_hand]))["start"] is None


def test_of_another_model_nothing_is_said(results: dict[str, Any]) -> None:
    other = skip_divergence(make_tiny("gpt2"), torch.randint(97, (2, 16)))
    data = data_of(questions([results["profile"], other]))
    assert (set(data["criteria"]), data["divergence"]) == ({"bi", "blend", "rho"}, None)


def test_block_influence_alone_answers_for_itself(results: dict[str, Any]) -> None:
    whole, alone = (data_of(questions([r])) for r in (results["profile"], results["profile"].influence))
    assert alone["criteria"] == {"bi": whole["criteria"]["bi"]}


def test_scores_that_rank_nothing_are_passed_over(results: dict[str, Any]) -> None:
    broken = replace(results["divergence"], variance=np.full(LAYERS, np.nan))
    assert questions([broken]) is None
    assert set(data_of(questions([results["profile"], broken]))["criteria"]) == {"bi", "blend", "rho"}


def test_layers_of_several_sizes_have_none(results: dict[str, Any]) -> None:
    curve: RemovalCurve = results["removal"]
    rows = (*curve.rows[:-1], replace(curve.rows[-1], parameters=curve.rows[-1].parameters - 1))
    assert data_of(questions([results["profile"], replace(curve, rows=rows)]))["layer"] is None


def test_a_run_without_a_ranking_asks_nothing(results: dict[str, Any], tmp_path: Path) -> None:
    assert questions([results["removal"]]) is None
    results["removal"].save(tmp_path / "removal.json")
    assert 'id="ask"' not in write_report(tmp_path).read_text(encoding="utf-8")


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
    data, code = parser.scripts
    assert json.loads(data)["model"] == HOSTILE
    assert parser.handlers == []
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert code == SCRIPT
    assert f"script-src 'sha256-{digest}'" in POLICY
    assert f'content="{escape(POLICY)}"' in text
    assert "default-src 'none'" in POLICY


def test_the_command_quotes_the_name(results: dict[str, Any]) -> None:
    for name in (HOSTILE, "--help", "a b"):
        command = data_of(questions([hostile(results["profile"], name)]))["command"]
        assert shlex.split(command) == [name]


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


def gone(page: Any) -> list[int]:
    return [int(text) for text in page.locator("#strip .gone").all_text_contents()]


def test_a_reader_chooses_and_is_answered(run: Path, page: Any, results: dict[str, Any]) -> None:
    page.goto(write_report(run).as_uri())
    profile = results["profile"]
    for name in ("rho", "bi"):
        page.select_option("#criterion", name)
        for count in (1, 4):
            page.locator("#count").fill(str(count))
            wanted = rank_layers(profile.contraction, profile.influence, criterion=name).plan(count).remove
            assert gone(page) == sorted(wanted)
            assert page.locator("#number").text_content() == str(count)
            command = page.locator("#command").text_content()
            assert f"--layers {','.join(map(str, sorted(wanted)))} " in command
    page.locator("#count").fill("2")
    answers = page.locator("#answers").inner_text()
    assert f"{results['removal'].rows[2].degradation:.3g} × dense, cut" in answers
    assert "nats a token, the sum of single layers" in answers
    assert "is picked in" in answers
    assert "score" in page.locator("#strip span").first.get_attribute("title")


def test_the_page_starts_at_its_plan_and_offers_to_mend_what_was_mended(
    run: Path, page: Any, results: dict[str, Any]
) -> None:
    profile, curve = results["profile"], results["removal"]
    plan = rank_layers(profile.contraction, profile.influence, criterion="bi").plan(2)
    plan.save(run / "plan-bi.json")
    cut = next(row for row in curve.rows if row.removed == plan.remove)
    replace(curve, rows=(curve.dense, replace(cut, criterion="mended"))).save(run / "recovery.json")
    page.goto(write_report(run).as_uri())
    assert page.locator("#criterion").input_value() == "bi"
    assert gone(page) == sorted(plan.remove)
    assert " --mend " in page.locator("#command").text_content()
    page.locator("#count").fill("1")
    assert " --mend " not in page.locator("#command").text_content()


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


def test_a_criterion_that_chose_one_number_shows_that(run: Path, page: Any, results: dict[str, Any]) -> None:
    page.goto(write_report(run).as_uri())
    page.locator("#count").fill("5")
    page.select_option("#criterion", "best")
    assert gone(page) == sorted(results["best"].remove)
    assert page.locator("#number").text_content() == "2"


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
    assert HOSTILE.partition("<")[0] in page.locator("#command").text_content()


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
