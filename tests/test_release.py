"""What is released: the wheel made from the sdist, alone in an environment from which the checkout is not reached."""

import ast
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cli_commands import samestep
from tiers import SMOKE, SMOKE_ON_GPUS

from samestep.doctor.check_table import PYTHON, TORCH
from samestep.version import OLDEST_PYTHON, OLDEST_TORCH, __version__

ROOT = Path(__file__).resolve().parents[1]
WHERE = "import samestep, sys; print(samestep.__file__, *sys.path, sep='\\n')"


def succeeded(*words, cwd):
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The sdist of the checkout, the wheel made from it, and an environment with that wheel.

    The environment sees the packages that the wheel depends on where they are installed already, by a path; the file
    beside them that leads to the checkout is not read from there.
    """
    folder = tmp_path_factory.mktemp("released")
    build = (sys.executable, "-m", "hatchling", "build", "-d", folder)
    succeeded(*build, "-t", "sdist", cwd=ROOT)
    sdist = folder / f"samestep-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    succeeded(*build, "-t", "wheel", cwd=folder / f"samestep-{__version__}")
    wheel = folder / f"samestep-{__version__}-py3-none-any.whl"
    succeeded(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    succeeded(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (own,) = (folder / "env").glob("lib/python*/site-packages")
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "dependencies.pth").write_text("\n".join(sorted(installed)) + "\n")
    return SimpleNamespace(sdist=sdist, wheel=wheel, python=python, command=(folder / "env" / "bin" / "samestep",))


def from_checkout(said):
    """Whether the package, or a place to import from, is that of the checkout."""
    home, *places = map(Path, said.splitlines())
    return ROOT / "src" in (home.parents[1], *places)


def unexpected(names):
    """The files of a wheel that are neither the package nor its metadata."""
    return [name for name in names if not re.match(rf"samestep(-{re.escape(__version__)}\.dist-info)?/", name)]


def test_the_wheel_has_every_file_of_the_package_and_no_other(released):
    with zipfile.ZipFile(released.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = succeeded("git", "ls-files", "src/samestep", "docs/causes.md", cwd=ROOT).splitlines()
    assert names == {name.removeprefix("src/").replace("docs/", "samestep/docs/") for name in listed}
    assert unexpected(names) == []
    assert unexpected({"samestep/run/run.py", "tests/worlds.py"}) == ["tests/worlds.py"]


def test_the_sdist_has_what_develops_and_cites_samestep(released):
    with tarfile.open(released.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = """CITATION.cff CODE_OF_CONDUCT.md CONTRIBUTING.md LICENSE Makefile PKG-INFO README.md SECURITY.md
        benchmarks/bench.py constraints.txt docs/installation.md examples/ddp.py mkdocs.yml tests/conftest.py
        tools/versions.py"""
    assert {*needed.split()} - names == set()


def test_the_metadata_says_what_the_project_says(released):
    with zipfile.ZipFile(released.wheel) as archive:
        metadata = message_from_bytes(archive.read(f"samestep-{__version__}.dist-info/METADATA"))
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert (metadata["Name"], metadata["Version"]) == ("samestep", __version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert licences
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True).decode() == (ROOT / "README.md").read_text("utf-8")
    assert {"torch>=2.10", "numpy>=1.26"} <= {*metadata.get_all("Requires-Dist")}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (cited["version"], cited["license"]) == (__version__, metadata["License-Expression"])
    assert f"\n## {__version__} - " in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_nothing_of_the_checkout_is_imported(released, tmp_path):
    said = succeeded(released.python, "-c", WHERE, cwd=tmp_path)
    assert Path(said.splitlines()[0]).is_relative_to(released.wheel.parent / "env")
    assert not from_checkout(said)
    reached = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {WHERE}"
    assert from_checkout(succeeded(released.python, "-c", reached, cwd=tmp_path))


def test_the_readme_s_example_prints_the_same_on_one_device_and_on_two(released, tmp_path):
    found = re.search(r'^```python title="train.py"\n(.*?)^```$', (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    (tmp_path / "train.py").write_text(found[1])
    alone = succeeded(released.python, "train.py", cwd=tmp_path)
    assert re.search(r"epoch 3, loss \d\.\d{7}\n$", alone)
    done = samestep("run", "--devices", "cpu:2", "train.py", cwd=tmp_path, command=released.command)
    assert (done.returncode, done.stdout) == (0, alone), done.stderr


def test_verify_and_explain_run(released, tmp_path):
    script = ("--samples", 128, "--epochs", 1)
    words = ("verify", "--logical-devices", 2, "--devices", "cpu:1,cpu:2", "--steps", 2, ROOT / "examples" / "ddp.py")
    done = samestep(*words, *script, cwd=tmp_path, command=released.command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitwise" in done.stdout
    page = samestep("explain", "batchnorm", cwd=tmp_path, command=released.command)
    assert (page.returncode, page.stderr) == (0, "")
    assert "BatchNorm" in page.stdout


def test_what_is_published_is_what_was_built_once_and_tested_on_each_python_that_is_named():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    builds = [name for name, job in jobs.items() if "hatchling build" in str(job["steps"])]
    assert builds == ["build"]
    assert [jobs[name].get("needs") for name in ("build", "test", "publish")] == ["gate", "build", "test"]
    assert ".ci/run" in str(jobs["gate"]["steps"])
    assert all("uses" in step for step in jobs["publish"]["steps"])  # no command that could change a file
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert not re.search(r"secrets\.|password|token:(?! write)", text)
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert jobs["test"]["strategy"]["matrix"]["python"] == classifiers
    asked = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text("utf-8"))["jobs"]
    assert ".ci/run" in str(asked["gate"]["steps"])
    assert ["3.11", *asked["quick"]["strategy"]["matrix"]["python"]] == classifiers


@pytest.fixture
def versions():
    """The tool that tries versions, as a module."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tools" / "versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tried(page):
    """The pairs of Python and torch of the table of what was tried and of the gate, and how many tests failed."""
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| (\d+\.\d+)\.\d+ \| (?:quick|short) \| \d+ \| \d+ \| (\d+) \|", page, re.M)
    gate = re.findall(r"On Python (3\.\d+) with PyTorch (\d+\.\d+) `\.ci/run` runs", page)
    return [*gate, *((python, torch) for python, torch, _ in rows)], sum(int(failed) for *_, failed in rows)


def named(project):
    """The Pythons of the classifiers, and the oldest Python and torch that may be installed."""
    oldest = re.search(r'^requires-python = ">=(.*)"$', project, re.M)[1], re.search(r'"torch>=(.*)"', project)[1]
    return re.findall(r"Python :: (3\.\d+)", project), *oldest


def test_what_the_project_names_was_tried_and_nothing_else_is_named():
    page = (ROOT / "docs" / "installation.md").read_text("utf-8")
    pairs, failed = tried(page)
    pythons, torches = ({*each} for each in zip(*pairs, strict=True))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    classifiers, oldest_python, oldest_torch = named(project)
    assert failed == 0
    assert {*classifiers} == pythons
    assert named(project.replace('Python :: 3.12"', 'Python :: 3.10"'))[0] != classifiers
    assert (oldest_python, oldest_torch) == (dotted(OLDEST_PYTHON), dotted(OLDEST_TORCH))
    assert (oldest_python, dotted(PYTHON)) == (classifiers[0], classifiers[-1])
    untried = re.search(r"^Without a row yet: PyTorch (.*)\.$", page, re.M)
    untried = untried[1].split(", ") if untried else []
    assert sorted([*torches, *untried]) == [f"2.{minor}" for minor in range(OLDEST_TORCH[1], TORCH[1] + 1)]


def dotted(version):
    return ".".join(map(str, version))


@pytest.mark.parametrize(
    ("python", "torch", "expected"),
    [
        ("3.10.13", "2.13.0", "samestep needs Python 3.11 or newer; "),
        ("3.11.0", "2.9.1+cu128", "samestep needs PyTorch 2.10 or newer; {torch} is 2.9.1+cu128: pip install "),
        ("3.11.0", "1.13.1", "samestep needs PyTorch 2.10 or newer; {torch} is 1.13.1: pip install "),
        ("3.11.0", "2.10.0a0+git1", ""),
        ("4.0.0", "3.0.0", ""),
    ],
)
def test_an_older_python_or_torch_is_refused_at_import_by_a_sentence_and_a_newer_one_is_not(
    python, torch, expected, tmp_path
):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('torch is imported')")
    (folder / "version.py").write_text(f"from typing import Optional\n__version__ = '{torch}'\ncuda = '12.8'\n")
    numbers = (*map(int, python.split(".")), "final", 0)
    code = f"import sys; sys.version_info = {numbers}; sys.path.insert(0, {str(tmp_path)!r}); import samestep"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    error = done.stderr.rpartition("\nImportError: ")[2]
    assert error.startswith(expected.format(torch=folder)), error
    assert (done.returncode, done.stderr == "") == ((1, False) if expected else (0, True))


def test_what_refuses_an_older_python_can_be_read_by_it():
    for name in ("__init__", "version"):
        source = (ROOT / "src" / "samestep" / f"{name}.py").read_text("utf-8")
        ast.parse(source, feature_version=(3, 8))
        with pytest.raises(SyntaxError):  # twin
            ast.parse(source + "\nmatch 1:\n    case 1:\n        pass\n", feature_version=(3, 8))
    dotted_names = [dotted(OLDEST_PYTHON), dotted(OLDEST_TORCH)]
    assert re.findall(r"needs \w+ (\d+\.\d+) or newer", source) == dotted_names


def test_a_row_takes_the_place_of_an_earlier_one_in_the_order_of_versions(versions):
    rows = "| 3.11.7 | 2.9.0 | quick | 5 | 1 | 0 | 2026-01-02 |\n| 3.12.1 | 2.10.0 | short | 3 | 0 | 1 | 2026-01-03 |\n"
    page = f"above\n{versions.HEAD}{rows}\nbelow\n"
    assert tried(page) == ([("3.11", "2.9"), ("3.12", "2.10")], 1)
    again = versions.with_row(page, "3.12.1", "2.10.0", ("quick", 9, 1, 0, "2026-01-04"))
    assert again == page.replace("short | 3 | 0 | 1 | 2026-01-03", "quick | 9 | 1 | 0 | 2026-01-04")
    more = versions.with_row(again, "3.11.7", "2.10.0", ("short", 4, 0, 0, "2026-01-04"))
    assert tried(more)[0] == [("3.11", "2.9"), ("3.11", "2.10"), ("3.12", "2.10")]
    assert more.endswith("| 2026-01-04 |\n\nbelow\n")
    with pytest.raises(ValueError, match="no table of versions"):
        versions.with_row("above\n", "3.12.1", "2.10.0", ("quick",))


def test_failures_and_errors_both_count_as_failed(versions):
    text = (
        '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1.5"/></testsuites>'
    )
    assert versions.counts(text) == {"passed": 4, "skipped": 3, "failed": 3}


def test_a_test_or_a_file_of_which_none_ran_is_named(versions):
    cases = (
        '<testcase classname="tests.run.test_a" name="test_b[x/y]"/><testcase classname="tests.test_c" name="test_d"/>'
    )
    ran = ["tests/run/test_a.py::test_b[x/y]", "tests/run/test_a.py", "tests/test_c.py::test_d"]
    missing = ["tests/run/test_a.py::test_b[z]", "tests/test_a.py"]
    assert versions.not_run(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", [*ran, *missing]) == missing


def test_the_constraints_of_another_torch_are_those_of_the_rest(versions):
    text = versions.unpinned((ROOT / "constraints.txt").read_text("utf-8"))
    assert not re.search(r"^(torch|numpy)==", text, re.M)
    assert "torchdata==" in text


def test_the_short_tests_exist_and_are_smoke_tests_beside_whole_files(versions):
    assert {name for name in versions.SHORT if not (ROOT / "tests" / name.partition("::")[0]).exists()} == set()
    assert {name for name in versions.SHORT if "::" in name} <= SMOKE_ON_GPUS
    assert {*versions.smoke()} == SMOKE - SMOKE_ON_GPUS


def test_an_environment_within_the_checkout_and_a_training_without_a_digest_are_refused(versions, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["versions.py", "2.13.0", "--environment", str(ROOT / "env")])
    with pytest.raises(SystemExit, match="name a folder outside of it"):
        versions.main()
    with pytest.raises(SystemExit, match="printed no digest"):
        versions.digest_of("loss 0.1")
    assert versions.digest_of(f"x\ndigest   {'ab' * 32}\n") == "ab" * 32
