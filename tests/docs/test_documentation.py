"""The documentation is true: its programs run, its commands, options, names, files and links exist."""

import importlib
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import typer
from worlds import close_mesh

import samestep
from samestep.cli.main import app
from samestep.recipes.catalog import NAMES, module_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLES = ROOT / "examples" / "README.md"
TUTORIALS = ROOT / "docs" / "tutorials.md"
GUIDES = [ROOT / "README.md", EXAMPLES, *DOCS]
PAGES = [*GUIDES, *(page for page in sorted(ROOT.glob("*.md")) if page.name != "README.md")]
SPANNING = re.MULTILINE | re.DOTALL
FENCE = re.compile(r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', SPANNING)
STARTS_WORKERS = "samestep.launch("


@dataclass(frozen=True)
class Block:
    """A block of code of a page; `line` is that of its first line of code."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.title or self.line}"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    return [
        Block(page, content[: match.start("text")].count("\n") + 1, language, match["title"], match["text"])
        for match in FENCE.finditer(content)
        if match["language"] == language
    ]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def execute(block: Block, names: dict) -> None:
    """Runs a block in this process; tracebacks show the page's line."""
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)


PROGRAMS = [block for page in PAGES for block in blocks(page, "python") if block.title]
LAYOUTS = [block for block in PROGRAMS if block.title.startswith("layout_")]  # of four ranks
OTHERS = [block for block in PROGRAMS if block.title.startswith("tutorial_")]  # of other libraries
RANKS = [block for block in PROGRAMS if block.title.startswith("ranks_")]  # which they start themselves
SCRIPTS = [block for block in PROGRAMS if STARTS_WORKERS not in block.text and block not in [*LAYOUTS, *OTHERS, *RANKS]]
NOTEBOOKS = [block for block in PROGRAMS if STARTS_WORKERS in block.text]
SNIPPETS = [page for page in PAGES if any(not block.title for block in blocks(page, "python"))]


@pytest.mark.parametrize("page", SNIPPETS, ids=named)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        if not block.title:
            execute(block, names)
    close_mesh()


def run_python(*arguments, folder, code=0):
    result = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=280)
    assert result.returncode == code, result.stderr
    return without_times(result.stdout)


def without_times(text):
    """What a program printed, but for its seconds and what it did in a second."""
    return re.sub(r"\d+\.\d s\b|[\d,]+ samples/s|'train_(runtime|\w+_per_second)': '[^']*'", "", text)


def without_digits(text):
    """What a page shows of a program's output, but for digits: a kind of CPU rounds in its own way."""
    return re.sub(r"\d[\d.e-]*", "#", re.sub(r"\b[0-9a-f]{64}\b", "#", without_times(text)))


def shown_output(block):
    """The block of text that follows a program on its page without a line between them, or None."""
    _, _, rest = block.page.read_text(encoding="utf-8").partition(f"{block.text}```\n\n")
    found = re.match(r"```text\n(.*?)^```$", rest, SPANNING)
    return None if found is None else found[1]


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_program_prints_the_same_on_one_device_and_on_three(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    execute(block, {"__name__": "__main__"})
    alone = without_times(capsys.readouterr().out)
    assert alone
    shown = shown_output(block)
    assert shown is None or without_digits(shown) == without_digits(alone)
    folder = tmp_path / "on three"  # a run refuses the folder of another one
    folder.mkdir()
    (folder / block.title).write_text(block.text, encoding="utf-8")
    assert run_python("-m", "samestep", "run", "--devices", "cpu:3", block.title, folder=folder) == alone


@pytest.mark.parametrize("block", [*LAYOUTS, *OTHERS], ids=str)
def test_a_program_of_another_library_prints_the_same_on_one_device_and_on_two(block, tmp_path):
    (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    options = ("-m", "samestep", "run", "--logical-devices", "4" if block in LAYOUTS else "2", "--devices")
    alone = run_python(*options, "cpu:1", block.title, folder=tmp_path)
    assert re.search(r"loss|accuracy|device", alone)
    assert run_python(*options, "cpu:2", block.title, folder=tmp_path) == alone


@pytest.mark.slow  # the same programs over processes: cli/test_run_spawning.py
@pytest.mark.parametrize("counts", [(1, 2), (3, 4)], ids=str)
@pytest.mark.parametrize("block", RANKS, ids=str)
def test_a_program_that_starts_its_ranks_prints_the_same_on_any_number_of_devices(block, counts, tmp_path):
    (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    options = ("-m", "samestep", "run", "--logical-devices", "4", "--devices")
    printed = [run_python(*options, f"cpu:{count}", block.title, folder=tmp_path) for count in counts]
    assert "loss" in printed[0]
    assert printed[0] == printed[1]


@pytest.mark.parametrize("block", NOTEBOOKS, ids=str)
def test_a_notebook_s_cell_starts_its_workers(block, tmp_path):
    (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    assert "'devices': 2" in run_python(block.title, folder=tmp_path)


SHOWN = [
    pytest.param(block, marks=[pytest.mark.slow] if page == EXAMPLES else [], id=f"{page.name}:{block.title}")
    for page in GUIDES
    for block in blocks(page, "text")
    if block.title
]


def accepts(block):
    """The pattern of what a command may print: in a line of its own … stands for any lines, within one for any text."""
    lines = (re.escape(line).replace("…", ".*") for line in without_digits(block.text).splitlines())
    return "".join(r"(?:.*\n)*?" if line == ".*" else rf"{line} *\n" for line in lines)


@pytest.mark.parametrize("block", SHOWN)
def test_a_command_prints_what_its_page_shows(block, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for program in blocks(block.page, "python"):
        if program.title:
            (tmp_path / program.title).write_text(program.text, encoding="utf-8")
    name, *words = shlex.split(block.title)
    command = *{"python": [], "samestep": ["-m", "samestep"]}[name], *words
    printed = without_digits(run_python(*command, folder=tmp_path, code=int("\ncause " in block.text)))  # of verify
    assert re.fullmatch(accepts(block), printed), printed


def test_another_output_than_a_page_shows_is_noticed():
    block = Block(EXAMPLES, 1, "text", "python one.py", "epoch 1: loss 0.5\n…\nepoch 9: loss 0.1, … done\n")
    assert re.fullmatch(accepts(block), without_digits("epoch 1: loss 0.7\nepoch 2\n\nepoch 9: loss 0.3, all done\n"))
    for other in (
        "epoch 1: loss 0.7\n",
        "epoch 1: cost 0.5\nepoch 9: loss 0.1, a done\n",
        "epoch 9: loss 0.1, a done\n",
    ):
        assert not re.fullmatch(accepts(block), without_digits(other))


def test_there_are_programs_of_every_sort():
    assert {block.values[0].page for block in SHOWN} >= {EXAMPLES, TUTORIALS}
    assert any(shown_output(block) is not None for block in SCRIPTS)
    assert SNIPPETS
    assert SCRIPTS
    assert NOTEBOOKS
    assert ROOT / "README.md" in {block.page for block in SCRIPTS}


def commands():
    """The commands of `samestep` by name ("ledger diff" too), each with its options by spelling."""
    group = typer.main.get_command(app)
    found, waiting = {}, [(name, group.get_command(None, name)) for name in group.list_commands(None)]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {word}", inner) for word, inner in getattr(command, "commands", {}).items()]
        options = command.params
        found[name] = {spelling: o for o in options for spelling in (*o.opts, *o.secondary_opts)}
    return found


def known_options():
    """The same with the arguments of recipes, which `samestep train` passes on."""
    found = commands()
    for name in NAMES:
        found["train"] |= recipe_options(name)
    return found


@cache
def recipe_options(name):
    """The arguments of a recipe by spelling."""
    found = {}

    def parse(parser, *_):
        for action in parser._actions:
            found.update({each: SimpleNamespace(is_flag=action.nargs == 0) for each in action.option_strings})
        raise KeyboardInterrupt

    with mock.patch("argparse.ArgumentParser.parse_args", parse), suppress(KeyboardInterrupt):
        import_module(module_of(name)).main()
    return found


def calls(page):
    """Every `samestep COMMAND …` of a page as words: in blocks, even within lists or behind a launcher, and inline."""
    text = page.read_text(encoding="utf-8")
    fenced = "\n".join(re.findall(r"^ *```bash\n(.*?)^ *```$", text, SPANNING))
    lines = [line.partition("# ")[0] for line in fenced.splitlines()]
    lines += re.findall(rf"`([^`\n]*\bsamestep (?:{'|'.join(commands())})\b[^`\n]*)`", FENCE.sub("", text))
    found = (re.search(r"(?:^|[\s(])samestep ([a-z][^()]*)", line) for line in lines)
    return [shlex.split(call[1]) for call in found if call is not None]


def misspelt(words, known):
    """What is wrong with a call; its script's own options are none of our business."""
    name, *rest = words
    if name not in known:
        return [name]
    if rest and f"{name} {rest[0]}" in known:
        name, *rest = f"{name} {rest[0]}", *rest[1:]
    wrong, waiting = [], list(rest)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            if name in ("run", "verify"):
                break
            continue
        option = known[name].get(word)
        if option is None:
            wrong.append(word)
        elif not option.is_flag:
            waiting = waiting[1:]
    return wrong


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_command_of_a_page_exists_with_its_options(page):
    known = known_options()
    assert [(words, wrong) for words in calls(page) if (wrong := misspelt(words, known))] == []


def test_a_misspelt_command_is_noticed(tmp_path):
    known = commands()
    page = tmp_path / "page.md"
    page.write_text(
        "1. first\n   ```bash\n   srun samestep run --one a.py # --no\n   ```\nBy `samestep train --two`.\n"
    )
    assert [misspelt(words, known) for words in calls(page)] == [["--one"], ["--two"]]
    assert misspelt(["train", "lenet", "--device", "cpu:2"], known) == ["--device"]
    assert misspelt(["run", "--devices", "cpu:2", "train.py", "--own"], known) == []
    assert misspelt(["heal"], known) == ["heal"]


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_every_option_that_a_page_speaks_of_exists(page):
    known = {spelling for options in known_options().values() for spelling in options}
    known |= {"--help", "--version", "--install-completion", "--show-completion"}
    if page in (EXAMPLES, TUTORIALS):
        known |= {
            option for path in EXAMPLES.parent.glob("*.py") for option in re.findall(r'"(--[a-z-]+)"', path.read_text())
        }
    spoken = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*", prose(page).replace("-->", "")))
    assert spoken <= known


@pytest.mark.parametrize("page", GUIDES, ids=named)
def test_a_page_says_in_one_wording_that_no_real_gpu_has_run_a_part(page):
    sentences = re.split(r"(?<=[.:;|])\s", " ".join(prose(page).split()))
    waiting = [
        sentence for sentence in sentences if re.search(r"GPU|NCCL", sentence) and re.search(r"yet|so far", sentence)
    ]
    assert [sentence for sentence in waiting if not re.search(r"no real GPU has run", sentence, re.IGNORECASE)] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_make_target_and_file_that_a_page_speaks_of_exists(page):
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE))
    phony = (ROOT / "Makefile").read_text(encoding="utf-8").split(".PHONY:")[1].splitlines()[0].split()
    assert {one or other for one, other in targets} <= set(phony)
    files = re.findall(r"`((?:src|tests|docs)/[\w./-]+|[\w]+\.(?:toml|txt))`", text)
    assert [name for name in files if "NAME" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_name_of_samestep_that_a_page_speaks_of_exists(page):
    for name in re.findall(r"`(samestep(?:\.\w+)+)", prose(page)):
        assert resolves(name), name


def resolves(name):
    """Whether a dotted name is a module or what one holds."""
    found = samestep
    for position, part in enumerate(name.split(".")[1:], start=2):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(name.split(".")[:position]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def anchors(page):
    """The headings of a page as the fragments that lead to them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    found = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
    if page.name == "cli.md":
        found |= {f"samestep-{name}" for name in commands()}
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_internal_link_of_a_page_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not fragment or fragment in anchors(target), link


def test_every_exported_name_can_be_had_and_is_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in samestep.__all__:
        assert hasattr(samestep, name)
        if name != "__version__":
            assert re.search(rf"^::: samestep\.{name}$", reference, re.MULTILINE), name
    assert "`samestep.__version__`" in reference


def address(page):
    """A page's path within the documentation."""
    return page.relative_to(ROOT / "docs").as_posix()


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [address(page) for page in DOCS if f" {address(page)}\n" not in navigation] == []
    assert " examples/README.md\n" in navigation


def test_the_readme_is_read_in_two_minutes():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    code = [
        line
        for kind in ("bash", "python", "text")
        for b in blocks(ROOT / "README.md", kind)
        for line in b.text.splitlines()
    ]
    assert len(lines) <= 100
    assert [line for line in code if len(line) > 75] == []


def test_the_site_can_be_searched_from_the_disk_and_fetches_nothing():
    # The plugin would fetch what lets a page search without a server: it is left out where a file of ours is for that.
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (polyfill,) = re.findall(r"^  polyfills:\n    - (\S*iframe-worker\S*)", settings, re.MULTILINE)
    script = (ROOT / "docs" / polyfill).read_text(encoding="utf-8")
    assert "\n  - search\n  - offline" in settings
    assert "font: false" in settings
    assert "://" not in script


def hook():
    """The module that mkdocs loads as a hook."""
    spec = importlib.util.spec_from_file_location("generated_pages", ROOT / "docs" / "generated_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generated(name):
    """A page as mkdocs gets it."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
    return hook().on_page_markdown((ROOT / "docs" / name).read_text(encoding="utf-8"), page=page)


def test_each_page_names_the_version_that_it_describes():
    assert hook().on_config({})["copyright"] == f"samestep {samestep.__version__}"


def build_site(root, folder):
    """Builds the site as mkdocs does, without the theme and the API's HTML, which take long."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(root / "mkdocs.yml"), plugins=[], theme="mkdocs", strict=True, site_dir=str(folder)))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build_site(ROOT, folder)
    return folder


def test_the_gate_builds_the_documentation_and_fails_by_a_link_that_leads_nowhere(tmp_path, caplog):
    gate = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    # `--quiet` would hide the warnings that `--strict` counts.
    assert [line.partition("mkdocs ")[2] for line in gate.splitlines() if "mkdocs" in line] == ["build --strict"]
    for name in ("docs", "examples", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    page = tmp_path / "examples" / "README.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[broken](ci/nowhere.yml)\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        build_site(tmp_path, tmp_path / "site")
    (fault,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]  # the link alone
    assert "contains a link 'ci/nowhere.yml'" in fault


def test_every_page_is_listed_with_a_sentence_in_the_order_of_the_navigation(site):
    listing = (site / "llms.txt").read_text(encoding="utf-8")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    assert listing.startswith(
        "# samestep\n\n> One training step, any devices, the same model.\n\n## Start\n\n- [samestep]"
    )
    assert re.findall("^## (.+)", listing, re.MULTILINE) == re.findall(r"^  - (.+):$", navigation, re.MULTILINE)
    assert re.findall(r"\((\S+\.md)\)", listing) == re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    entries = [line for line in listing.splitlines() if line.startswith("- ")]
    assert len(entries) == len(DOCS) + 1  # the examples
    assert [line for line in entries if not re.fullmatch(r"- \[[^]]+\]\(\S+\): .{20,}[.:]", line)] == []


def test_beside_every_page_is_its_markdown_to_which_it_links(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) == len(DOCS) + 1
    for page in pages:
        (name,) = re.findall(r'type="text/markdown" href="([^"]+)"', page.read_text(encoding="utf-8"))
        path = page.with_name(name)
        text = path.read_text(encoding="utf-8")
        assert path.stem == page.stem or path.name == "README.md"
        assert not re.search(r"<!-- generated|^:::|0x[0-9a-f]{6}", text, re.MULTILINE), path
        for link in re.findall(r"\]\(([^)\s#]+\.md)", prose(path)):
            assert "://" in link or (path.parent / link).is_file(), link


def test_the_markdown_of_generated_pages_holds_what_is_generated(site):
    interface = (site / "api.md").read_text(encoding="utf-8")
    for name in samestep.__all__:
        thing = getattr(samestep, name)
        if name != "__version__":
            assert inspect.ismodule(thing) or f"\n### samestep.{name}\n" in interface, name
            assert thing.__doc__.partition("\n")[0] in interface, name
    assert "\n### samestep.TrainStep.load_state_dict\n" in interface
    assert "\n## samestep train\n" in (site / "cli.md").read_text(encoding="utf-8")


def test_the_command_line_reference_holds_every_command_and_option():
    page = generated("cli.md")
    assert "<!--" not in page
    for name, options in commands().items():
        if any(other.startswith(f"{name} ") for other in commands()):
            continue  # a group, whose commands have sections of their own
        section = page.split(f"\n## samestep {name}\n")[1].split("\n## ")[0]
        for spelling, option in options.items():
            if option.param_type_name == "option":
                assert f"`{spelling}`" in section
                assert option.help.replace("|", "\\|") in section


def test_the_first_page_is_the_readme_with_links_within_the_documentation():
    page = generated("index.md")
    assert page.startswith("# samestep\n")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page) if not link.startswith("examples/")]
    assert "scripts.md" in links
    assert [link for link in links if not (ROOT / "docs" / link.partition("#")[0]).is_file()] == []


def test_the_table_of_recipes_holds_every_recipe():
    page = generated("recipes.md")
    assert "<!--" not in page
    for name in NAMES:
        assert f"| `{name}` |" in page
