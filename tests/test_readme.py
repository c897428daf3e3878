"""Python code in the README and docs/ runs as printed. Links in the root folder's pages have targets."""

import inspect
import json
import re
import tomllib
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import deqseq

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
ROOT_PAGES = sorted(ROOT.glob("*.md"))


def python(page: Path) -> list[str]:
    """The page's Python blocks. Each starts with empty lines, so tracebacks show the page's line numbers."""
    text = page.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in blocks]


@pytest.mark.parametrize("page", [page for page in PAGES if python(page)], ids=lambda page: page.stem)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page run in order. A block may use names from earlier blocks."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for block in python(page):
        for package in ("peft", "torchao"):
            if f"from {package}" in block:
                pytest.importorskip(package, reason=f"{package} is not installed: pip install 'deqseq[dev]'")
        if "from vllm import" in block or "from openai import" in block:
            continue  # tests/vllm/test_page.py runs it
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", ROOT_PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Every local link in a page of the root folder has a target. `make docs` checks the links in docs/."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        target = ROOT / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def anchors(text: str) -> set[str]:
    """The anchors that GitHub generates for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_a_landing_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900


def test_folders_that_contributing_lists_exist() -> None:
    listing = re.search(
        r"^```text\ndeqseq/\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.M
    )
    assert listing is not None
    folder = ROOT / "deqseq"
    for line in listing[1].splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split(", ")
        folder = folder if line.startswith(" ") else ROOT
        for name in names:
            assert (folder / name).exists(), line


def test_the_reference_has_every_public_name() -> None:
    """docs/api.md lists every class and function in an ``__all__`` of the package, under any of its paths."""

    def at(path: str) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(import_module(module), name)

    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    public = []
    for file in sorted((ROOT / "deqseq").rglob("*.py")):
        if re.search(r"^__all__ = ", file.read_text(), re.MULTILINE):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            public += [f"{module}.{name}" for name in at(f"{module}.__all__")]
    parts = [path for path in public if inspect.isclass(at(path)) or inspect.isfunction(at(path))]
    assert parts and not [path for path in parts if at(path) not in map(at, listed)]


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation and newest
    assert deqseq.__version__ == project["version"] == citation[1] == newest[1]


def test_no_claim_without_its_control() -> None:
    """If a table compares perplexities of implicit and explicit models, its section names the control."""
    compared = 0
    for page in PAGES:
        for section in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE):
            table = " ".join(line for line in section.splitlines() if line.startswith("|"))
            if all(re.search(rf"\b{word}\b", table, re.I) for word in ("perplexity", "implicit", "explicit")):
                compared += 1
                assert re.search(r"\b(injected|control)\b", section, re.I), f"{page}: {section[:60]}"
    assert compared


def test_the_tables_of_the_study_are_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/what-iteration-buys.md and the README have the numbers that follow from the study's JSON file."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from iteration.results import Result, tables

    results = json.loads((ROOT / "docs/results/what-iteration-buys.json").read_text())
    found = tables([Result(**run) for run in results["runs"]])
    assert found == results["tables"]
    page = (ROOT / "docs/what-iteration-buys.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert rows == [line for text in found.values() for line in text.splitlines()]
    first = min((run for run in results["runs"] if run["model"] == "llama-130m"), key=lambda run: run["date"])
    for form in ("explicit", "2+1", "4+1", "injected"):
        perplexity = {
            run["unit"]: run["perplexity"] for run in results["runs"]
            if (run["model"], run["data"], run["form"], run["learning_rate"], run["seed"])
            == ("llama-130m", first["data"], form, 1e-3, 1)
        }  # fmt: skip
        assert f"| {perplexity['seconds']:.2f} | {perplexity['tokens']:.2f} |" in README.read_text(), form


def test_the_tables_of_scaling_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/pretraining.md has the tables that follow from the JSON file of benchmarks/scaling.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from scale.results import tables

    found = json.loads((ROOT / "docs/results/scaling.json").read_text())
    assert tables(found["results"]) == found["tables"]
    page = (ROOT / "docs/pretraining.md").read_text()
    assert all(text in page for text in found["tables"].values()) and len(found["tables"]) == 6


def test_the_tables_of_text_tracking_are_results() -> None:
    """docs/text-tracking.md has the scores in the JSON files of the command ``evaluate``."""
    results, page = ROOT / "docs/results", (ROOT / "docs/text-tracking.md").read_text()
    training = json.loads((results / "text-tracking-training.json").read_text())["runs"]
    for model in ("mamba2", "llama"):
        found = json.loads((results / f"text-tracking-{model}.json").read_text())
        forms = {run["form"]: run for run in training if run["model"].startswith(model) and run["seed"] == 1}
        assert sorted(found["models"]) == sorted(forms) and len(forms) == 9
        for form, run in forms.items():
            cells = [f"{run['tokens'] / 1e6:.1f}"]
            for length in (64, 256):
                (score,) = (s for s in found["scores"] if (s["model"], s["length"]) == (form, length))
                cells.append(f"{score['accuracy']:.3f} ({score['answer_nll']:.3f})")
                cells.append(" / ".join(f"{part['accuracy']:.3f}" for part in score["by_operations"][:4]))
            name = form + (": the control" if form == "injected" else "")
            assert f"| {name} | {' | '.join(cells)} |" in page, (model, form)
    scores = json.loads((results / "text-tracking-mamba2-seeds.json").read_text())["scores"]
    for form in ("injected", "1+1", "2+1"):
        mine = [score for score in scores if score["model"].startswith(f"{form}/")]
        seeds = [[f"{s['accuracy']:.3f}" for s in mine if s["length"] == length] for length in (64, 256)]
        assert f"| {', '.join(seeds[0])} | {', '.join(seeds[1])} |" in page and len(seeds[0]) == 3, form


def test_the_forms_of_state_tracking_are_the_study_s_results() -> None:
    """docs/state-tracking.md and the README have the means of the study ``forms``, from its JSON file."""
    results = json.loads((ROOT / "docs/results/state-tracking-forms.json").read_text())
    page, readme = (ROOT / "docs/state-tracking.md").read_text(), README.read_text()

    def mean(form: str, length: int, window: int | None) -> str:
        found = [
            r["evaluation"]["accuracy_last10"] for r in results
            if (r["variant"], r["case"]["length"], r["case"].get("window")) == (form, length, window)
        ]  # fmt: skip
        assert len(found) == 3
        return f"{fmean(found):.3f}"

    forms = list(dict.fromkeys(r["variant"] for r in results))
    assert len(forms) == 7
    for form in forms:
        windows = [None, 8, 1] if "unrolled" in form or form == "implicit" else [None]
        cells = [" / ".join(mean(form, length, window) for window in windows) for length in (16, 64)]
        assert f"| {form} | {cells[0]} | {cells[1]} |" in page, (form, cells)
    assert f"is {mean('implicit', 64, 8)} for three implicit models" in readme
    assert f"guess ({mean('injected', 64, None)} and {mean('explicit', 64, None)})" in readme


def test_the_limits_of_state_tracking_are_the_study_s_results() -> None:
    """docs/state-tracking.md has the worst seed and the mean of the study ``limits``, from its JSON file."""
    results = json.loads((ROOT / "docs/results/state-tracking-limits.json").read_text())
    page = (ROOT / "docs/state-tracking.md").read_text()
    names = {
        "limit-32": "32, 0.2", "limit-11": "11, 0.4 (the run file)", "limit-11-rehearsal-0.6": "11, 0.6",
        "limit-32-rehearsal-0.4": "32, 0.4",
    }  # fmt: skip
    assert sorted({r["variant"] for r in results}) == sorted(names)
    for variant, name in names.items():
        cells = []
        for p, length in product((0.5, 0.9), (256, 1024, 4096)):
            case = {"identity_probability": p, "length": length, "window": 32}
            found = [
                r["evaluation"]["accuracy_last10"] for r in results
                if r["variant"] == variant and r["case"].items() >= case.items()
            ]  # fmt: skip
            assert len(found) == 6
            cells.append(f"{min(found):.3f} ({fmean(found):.3f})")
        assert f"| {name} | {' | '.join(cells)} |" in page, name


def test_the_tables_of_sudokus_are_those_of_the_results() -> None:
    """docs/reasoning.md has the numbers of all runs, solvers and controls in the JSON file."""
    results = json.loads((ROOT / "docs/results/sudoku.json").read_text())
    page = (ROOT / "docs/reasoning.md").read_text().replace("**", "")
    runs = results["runs"]
    assert [run["seed"] for run in runs] == [1, 2, 3] * 2 and {run["steps"] for run in runs} == {13_000}

    def fixed(run: dict[str, Any], name: str, depth: int, starts: int) -> float:
        return float(_one(run[name]["rows"], depth=depth, starts=starts)["exact"])

    for run in runs:
        shares = [fixed(run, "depth", 2**power, 1) for power in range(3, 11)]
        shares.append(fixed(run, "best", 64, 16))
        name = f"| {run['date']} | {run['seed']} | "
        assert f"{name}{run['seconds']:.0f} | {' | '.join(map('{:.3f}'.format, shares))} |" in page
        (found,) = run["depth"]["adaptive"]
        assert f"{name}{found['converged']:.3f} | {found['exact']:.3f} | {found['evaluations']:.1f} |" in page
        assert all(row["exact_if_converged"] == 1 for row in _restarts(run))
        several = [
            "{exact:.3f} ({evaluations:.1f})".format(**_one(_restarts(run), starts=starts, max_iter=most))
            for starts, most in ((2, 32), (4, 16), (32, 32))
        ]
        at_64, at_1024 = (f"{fixed(run, 'depth', depth, 1):.3f}" for depth in (64, 1024))
        columns = [at_64, *several[:2], at_1024, several[2]]
        assert f"{name}{' | '.join(columns)} |" in page
    for row in results["strategies"]:
        assert f"| {row['steps']:,} | {row['seconds']:.0f} | {row['exact']:.3f} |" in page
    coarse, fine = results["solvers"][::2], results["solvers"][1::2]
    assert len(coarse) == 12
    for pair in zip(coarse, fine, strict=True):
        assert [row["tolerance"] for row in pair] == [0.1, 0.01] and len({row["solver"] for row in pair}) == 1
        names = [("evaluations", ".1f"), ("seconds", ".1f"), ("converged", ".3f"), ("exact", ".3f")]
        columns = [f"{row[name]:{digits}}" for name, digits in names for row in pair]
        assert f" | {' | '.join(columns)} |" in page


def test_the_tables_of_mazes_are_those_of_the_results() -> None:
    """docs/reasoning.md has the numbers of the JSON file. The kept weights are those of the best test."""
    results = json.loads((ROOT / "docs/results/mazes.json").read_text())
    page = (ROOT / "docs/reasoning.md").read_text().replace("**", "")
    assert [run["seed"] for run in results["runs"]] == [1, 2, 3]
    for run in results["runs"]:
        rows, others = (
            {row["depth"]: row for row in found} for found in (run["rows"], run["others"]["rows"])
        )
        shares = [f"{rows[depth]['exact']:.3f}" for depth in (16, 24, 32, 40, 48, 64, 128)]
        (found,) = run["adaptive"]
        columns = [*shares, f"{found['exact']:.3f}", f"{found['evaluations']:.1f}"]
        name = f"| {run['seed']} | {run['seconds']:.0f} | {run['kept_step']:,} | "
        assert f"{name}{' | '.join(columns)} |" in page
        aurocs = [rows[depth]["auroc"] for depth in (16, 24, 32, 40, 48)]
        aurocs += [others[depth]["auroc"] for depth in (24, 32, 40)]
        solved = 1 - others[64]["wrong"] / run["others"]["mazes"]
        assert f"| {run['seed']} | {' | '.join(map('{:.3f}'.format, aurocs))} | {solved:.4f} |" in page


def _restarts(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [*run["best"]["adaptive"], *run["restarts"]["adaptive"]]


def _one(rows: list[dict[str, Any]], **key: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if row.items() >= key.items()]
    return found
