"""The repository around the code: the files that must be there, the pins, the wheel, and the words in it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "meshloom"
REQUIRED = (
    ".ci/run CHANGELOG.md CONTRIBUTING.md LICENSE Makefile README.md constraints.txt pyproject.toml "
    "docs/dependencies.md docs/from_scratch.md docs/layout.md docs/placements.md docs/planner.md docs/training.md "
    ".github/workflows/test.yml .github/pull_request_template.md .pre-commit-config.yaml mkdocs.yml "
    "examples/train_llama.py src/meshloom/py.typed"
).split()
TEXTS = (".py", ".md", ".toml", ".txt", ".cfg", ".json", ".yml", ".yaml", ".sh", "")

# What belongs to one machine or one registry and not to the project; written so that this file does not hold it.
FORBIDDEN = (
    r"/" + r"work/",
    r"/" + r"root\b",
    r"/" + r"home/\w",
    r"/" + r"Users/\w",
    r"/" + r"opt/",
    r"index[-_]url",
    r"find[-_]links",
    # package registries and their mirrors; papers, projects and standards may be cited by their addresses
    r"https?://[^\s/]*(?:py"
    + r"pi|python"
    + r"hosted|npm"
    + r"js|ana"
    + r"conda|crates\.io|deb"
    + r"ian|ubun"
    + r"tu)\.?[^\s/]*",
    r"https?://download\." + r"pytorch\.org",
    r"https?://\S+/simple\b",
    r"https?://(?!127\.)\d+\.\d+\.\d+\.\d+",
    r"\b(?:10(?!\.77\.)|192\.168|172\.16)\.\d+\.\d+\.\d+\b",  # loopback and the tests' own namespaces are no machine
)


def tracked_files() -> list[Path]:
    """What git knows or would take; without git, whatever lies here and is not made."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else REQUIRED
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def requirement_names(path: str) -> set[str]:
    text = (ROOT / path).read_text()
    lines = (line for line in text.splitlines() if re.match(r"[A-Za-z]", line))
    return {_normal(re.split(r"[=<>;\[ ]", line)[0]) for line in lines}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_dependencies() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:requires|dependencies|test|models|docs|fast|bench) = \[(.*)\]$", text, re.MULTILINE)
    assert len(lists) == 7
    return {_normal(name) for each in lists for name in re.findall(r'"([A-Za-z][\w.-]*)', each)}


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_file_is_there(name):
    assert (ROOT / name).is_file()


def test_the_license_is_apache_2_with_the_authors_named():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "the meshloom authors" in text


def test_ci_runs_make_test_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert [line for line in lines[1:] if line.strip()] == ["set -euo pipefail", "make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("target", ["help", "demo", "check", "test", "docs", "browser", "bench", "soak", "clean"])
def test_make_has_the_target_and_help_tells_it(target):
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.search(rf"^make {target} +\w", shown.stdout, re.MULTILINE)


def test_make_check_names_test_files_that_are_there():
    listed = re.search(r"^QUICK := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    for name in listed[1].replace("\\\n", " ").split():
        assert len([*(ROOT / "tests").rglob(f"test_{name}.py")]) == 1, name


def test_the_workflow_runs_what_people_run_on_the_python_that_is_named():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert set(workflow["jobs"]) == {"test", "docs", "wheel"}
    steps = {name: [each.get("run", "") for each in job["steps"]] for name, job in workflow["jobs"].items()}
    assert "make test" in steps["test"] and "make docs" in steps["docs"] and "python -m build" in steps["wheel"]
    pythons = {each["with"]["python-version"] for job in workflow["jobs"].values() for each in job["steps"]
               if "python-version" in each.get("with", {})}  # fmt: skip
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert pythons == set(classified) == {"3.11"}
    assert "on Python 3.11" in (ROOT / "docs" / "dependencies.md").read_text()


def test_the_last_command_of_make_test_is_pytest():
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    commands = recipe[1].strip().splitlines()
    assert [re.search(r"ruff check|ruff format --check|mypy|pytest", line)[0] for line in commands] == [
        "ruff check",
        "ruff format --check",
        "mypy",
        "pytest",
    ]


def test_constraints_pin_torch_and_everything_else_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "torch==2.13.0"
    for line in lines:
        assert re.fullmatch(r'[\w.-]+==[\w.]+(?:; python_version (?:<|>=) "3\.\d+")?', line), line


def test_every_declared_dependency_is_pinned_and_has_its_reason():
    pinned = requirement_names("constraints.txt")
    reasons = {
        _normal(name) for name in re.findall(r"^\| `([^`]+)`", (ROOT / "docs/dependencies.md").read_text(), re.M)
    }
    assert declared_dependencies() <= pinned
    assert declared_dependencies() == reasons


def test_the_version_is_the_same_everywhere():
    import meshloom

    assert f'version = "{meshloom.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## [{meshloom.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_layout_names_every_source_file_and_no_other():
    named = set(re.findall(r"^\| `([^`]+\.(?:py|typed))`", (ROOT / "docs/layout.md").read_text(), re.MULTILINE))
    files = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*") if path.suffix in (".py", ".typed")}
    assert named == files


def test_the_map_of_the_layout_shows_every_room_and_no_other():
    text = (ROOT / "docs/layout.md").read_text()
    drawn = text[text.index("```text") : text.index("## Files")]
    shown = {name for line in drawn.splitlines() for name in re.findall(r"^  ([a-z, ]+)/? {2}", line) if name.strip()}
    rooms = {path.stem for path in SOURCES.iterdir() if not path.name.startswith("_") and path.suffix in ("", ".py")}
    assert {each.strip() for name in shown for each in name.split(",")} == rooms


def found_words(text: str) -> list[str]:
    return [match[0] for pattern in FORBIDDEN for match in re.finditer(pattern, text)]


def test_no_text_of_the_repository_names_a_machine_or_a_registry():
    files = [path for path in tracked_files() if path.suffix in TEXTS]
    assert len(files) > 30
    found = {str(path.relative_to(ROOT)): words for path in files if (words := found_words(path.read_text("utf-8")))}
    assert not found


def test_a_machine_path_would_be_found():
    assert found_words("see /" + "work/main") and found_words("http" + "://example.org/simple")
    assert found_words("https" + "://py" + "pi.org/project/meshloom") and found_words("http" + "://198.51.100.7/")
    assert not found_words("https" + "://arxiv.org/abs/2105.04663, https" + "://github.com/pytorch/pytorch")
    assert not found_words("src/meshloom/ops/table.py, 10.0 us, 1.27.0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources without reaching for anything outside."""
    assert importlib.util.find_spec("setuptools") is not None, "setuptools is missing: run make test once"
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    for path in tracked_files():
        if path.relative_to(ROOT).parts[0] in ("src", "pyproject.toml", "README.md", "LICENSE"):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_installs_into_a_fresh_environment_and_imports_from_there(wheel, tmp_path):
    place = tmp_path / "fresh"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    site = next((place / "lib").glob("python*")) / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True)
    # torch and numpy are lent by the environment that runs the tests, behind what was installed
    lent = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("torch", "numpy", "rich")}
    (site / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    program = "import meshloom; meshloom.matmul; print(meshloom.__file__)"
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site / "meshloom" / "__init__.py")
    assert (site / "meshloom" / "py.typed").is_file()


@pytest.mark.slow
def test_the_wheel_holds_every_source_file_and_no_tests(wheel):
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    for path in SOURCES.rglob("*.py"):
        assert f"meshloom/{path.relative_to(SOURCES)}" in names
    for name in ("report.html", "report.css", "report.js"):
        assert f"meshloom/observe/report/{name}" in names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "examples"))]


def test_the_tests_of_a_file_are_dealt_out_together(request: pytest.FixtureRequest) -> None:
    """By the name that xdist is told; where it is dropped, every process starts clusters and Ray of its own."""
    if not hasattr(request.config, "workerinput") or not request.config.getvalue("loadgroup"):
        pytest.skip("this process is not one of several that share the tests in groups")
    assert request.node.nodeid.endswith("@tests/project/test_repository.py")
    grouped = [each for each in request.session.items if each.get_closest_marker("xdist_group")]
    assert all(each.nodeid.endswith(f"@{each.get_closest_marker('xdist_group').args[0]}") for each in grouped)
