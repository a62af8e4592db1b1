"""The comparison as one HTML file: its bytes, its limits, and how a real browser takes it."""

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, page
from run_folders import metric_rows, write_run, write_sweep, write_troubled_sweep
from test_report_compare import NASTY, golden

from grpo_exp.report.charts import ArmCurves, Axes, curves, mean_curve
from grpo_exp.report.compare import main

LIMIT_BYTES = 400_000

AXE = os.environ.get("AXE_CORE")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(root: str = "runs", *arguments: str) -> str:
    assert main([root, "--html", "report.html", *arguments]) == 0
    return Path("report.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every tag opened, with its attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", ["clean", "troubled"])
def test_the_page_is_the_golden_one(kind: str) -> None:
    (write_sweep if kind == "clean" else write_troubled_sweep)(Path("runs"))
    golden(f"compare_{kind}.html", written())


def test_the_bytes_are_the_same_in_another_process() -> None:
    write_troubled_sweep(Path("runs"))
    first = written()
    code = "from grpo_exp.report.compare import main; main(['runs', '--html', 'again.html'])"
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "7"}
    )
    assert Path("again.html").read_text(encoding="utf-8") == first


def test_nothing_is_asked_of_the_network() -> None:
    write_sweep(Path("runs"))
    text = written()
    assert "://" not in text
    assert "default-src 'none'" in text
    loading = [
        (tag, a)
        for tag, a in Tags(text).tags
        if tag in ("script", "img", "iframe", "link") and ("src" in a or "href" in a)
    ]
    assert [attributes["href"] for _, attributes in loading] == ["data:,"]


def test_hundreds_of_runs_stay_below_the_limit() -> None:
    for precision in ("bf16", "fp16", "fp32"):
        for seed in range(100):
            write_run(Path("runs"), precision=precision, seed=seed, num_steps=60)
    assert len(written().encode()) < LIMIT_BYTES


def test_reward_and_mismatch_are_drawn_over_every_axis_with_a_mean_of_runs_that_share_no_place() -> None:
    for seed in range(2):  # seed 1 trains more tokens in a step, and faster
        rows = [
            row | {"tokens": row["tokens"] * (10 + seed) // 10, "wall_s": row["wall_s"] / (1 + 0.3 * seed)}
            for row in metric_rows("bf16", seed)
        ]
        write_run(Path("runs"), precision="bf16", seed=seed, rows=rows)
    text = written()
    for key in ("eval/accuracy", "reward/mean", "mismatch/abs_mean"):
        for axis in ("step", "completions trained", "tokens trained", "seconds of training"):
            drawing = re.search(rf'aria-label="{key} over {axis}">(.*?)</svg>', text)
            assert drawing, (key, axis)
            thick = re.search(r'class="bold s0 d0" d="(M[^"]+)"', drawing[1])
            assert thick, (key, axis)
            assert len(re.findall(r"[\d.]+", thick[1].partition("l")[2])) >= 4, (key, axis)


def test_a_mean_of_curves_without_shared_places_lies_between_them_and_ends_with_the_shorter_one() -> None:
    a, b = [(0.0, 0.0), (2.0, 2.0), (4.0, 4.0)], [(0.0, 1.0), (1.0, 3.0), (3.0, 7.0)]
    assert mean_curve([a, b]) == [(0.0, 0.5), (1.0, 2.0), (2.0, 3.5), (3.0, 5.0)]
    assert mean_curve([a, a[:2]]) == a[:2]
    assert mean_curve([[(0.0, 1.0), (1.0, 1.0)], [(5.0, 1.0), (6.0, 1.0)]]) == []


def test_a_path_of_steps_ends_where_its_last_point_is() -> None:
    points = [(float(x), math.sin(x) * 3) for x in range(50)]
    drawing = curves([ArmCurves("a", 0, [points])], "t", "x", "y")
    assert drawing is not None
    path = re.search(r'class="bold s0 d0" d="M([\d.]+) ([\d.]+)l([^"]+)"', drawing)
    assert path
    steps = [float(part) for part in re.findall(r"-?[\d.]+", path[3])]
    assert len(steps) == 2 * 49
    axes = Axes.around(*zip(*points, strict=True))
    across, down = float(path[1]) + sum(steps[::2]), float(path[2]) + sum(steps[1::2])
    assert [f"{across:.1f}", f"{down:.1f}"] == [f"{float(part):.1f}" for part in axes.at(*points[-1])]


def test_names_are_escaped() -> None:
    write_run(Path("runs"), "one", factors={"x": NASTY}, config={"x": NASTY}, manifest={"run.name": NASTY})
    write_run(
        Path("runs"), "two", factors={"x": "</script><b>"}, config={"x": "</script><b>"}, state="failed", reason="<i>"
    )
    found = Tags(written())
    assert {tag for tag, _ in found.tags}.isdisjoint({"b", "i", "img"})
    assert "<img src=x>" in found.text


@pytest.mark.parametrize("state", ["failed", "created", "done"])
def test_a_sweep_without_rows_or_with_gaps_has_a_page(state: str) -> None:
    write_run(Path("runs"), precision="bf16", state=state, reason="it failed", rows=[])
    rows = [row | {"eval/accuracy": None} if row["step"] else row for row in metric_rows("fp32", 0, 7)]
    write_run(Path("runs"), precision="fp32", state="running", rows=rows)
    assert "State of every run" in written()


def test_only_broken_folders_have_a_page() -> None:
    (write_run(Path("runs")) / "status.json").unlink()
    assert "status.json is missing" in written()


def test_arms_have_dashes_of_their_own_and_not_colours_alone() -> None:
    write_sweep(Path("runs"))
    assert {"s0 d0", "s1 d1", "s2 d2"} <= set(re.findall(r"bold (s\d d\d)", written()))


def test_a_file_that_cannot_be_written_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("runs"))
    assert main(["runs", "--html", "nowhere/report.html"]) == 2
    assert capsys.readouterr().err.startswith("error: --html='nowhere/report.html'")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
def test_a_browser_without_network_opens_it_and_sorts_by_keyboard(tmp_path: Path) -> None:
    write_troubled_sweep(Path("runs"))
    written()
    with page(tmp_path / "profile") as tab:
        tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        tab.open(tmp_path / "report.html")
        first = "[...document.querySelectorAll('table')[0].tBodies[0].rows].map(r => r.cells[0].textContent)"
        focused = "document.activeElement.textContent"
        before = tab.js(first)
        for _ in range(60):
            tab.press("Tab", 9)
            if tab.js(focused) == "arm":
                break
        assert tab.js(focused) == "arm"
        tab.press("Enter", 13, "\r")
        assert tab.js(first) == sorted(before)
        tab.press("Enter", 13, "\r")
        assert tab.js(first) == sorted(before, reverse=True)
        assert tab.js("document.activeElement.parentElement.getAttribute('aria-sort')") == "descending"
        assert tab.js("document.documentElement.scrollWidth <= window.innerWidth")
        kinds = [event["method"] for event in tab.events]
        assert "Runtime.exceptionThrown" not in kinds
        assert "Runtime.consoleAPICalled" not in kinds
        assert "Log.entryAdded" not in kinds, [event for event in tab.events if event["method"] == "Log.entryAdded"]
        asked = [
            event["params"]["request"]["url"] for event in tab.events if event["method"] == "Network.requestWillBeSent"
        ]
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@pytest.mark.browser
@pytest.mark.skipif(
    CHROMIUM is None or AXE is None, reason="no chromium, or AXE_CORE names no axe.min.js (npm axe-core)"
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_core_finds_nothing_that_keeps_anyone_from_reading_it(scheme: str, tmp_path: Path) -> None:
    write_troubled_sweep(Path("runs"))
    written()
    assert AXE is not None
    with page(tmp_path / "profile") as tab:
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.open(tmp_path / "report.html")
        tab.js(Path(AXE).read_text() + ";0")
        run = "axe.run().then(found => JSON.stringify(found.violations.map(v => [v.id, v.impact, v.nodes.length])))"
        answer = tab.call("Runtime.evaluate", expression=run, awaitPromise=True, returnByValue=True)
        assert json.loads(answer["result"]["value"]) == []
