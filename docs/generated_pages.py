"""The generated pages: a mkdocs hook that writes the command line reference and the table of recipes from the code.

A page holds a marker, such as `<!-- generated: commands -->`, which is replaced when the documentation is built. The
first page is the README. The folder `examples` is a part of the site. Beside each page is its Markdown, which it
links; `llms.txt` lists these, in the form of https://llmstxt.org. Nothing generated is kept.
"""

import inspect
import pydoc
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

MARKER = "<!-- generated: {} -->"
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
_TEXTS: dict[str, str] = {}  # the Markdown of each page, by its path in the site
_SECTIONS: list[Any] = []  # of the navigation


def on_config(config: Any, **_: Any) -> Any:
    """Writes below each page which version it describes."""
    from samestep.version import __version__

    config["copyright"] = f"samestep {__version__}"
    return config


def on_pre_build(**_: Any) -> None:
    """Begins the pages."""
    _TEXTS.clear()


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds the examples, which lie beside the pages: their own page, and each file that it links."""
    from mkdocs.structure.files import File

    page = EXAMPLES / "README.md"
    links = re.findall(r"\]\((\w[^)#:]*)\)", page.read_text("utf-8"))
    for source in sorted({page.name, *links}):
        if (EXAMPLES / source).is_file():
            files.append(File.generated(config, f"examples/{source}", abs_src_path=str(EXAMPLES / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the markers of a page; mkdocs calls this for each one."""
    # In the site the folder of the examples is within that of the pages.
    markdown = markdown.replace("](../examples/", "](examples/").replace("](../docs/", "](../")
    for name, write in GENERATORS.items():
        marker = MARKER.format(name)
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    # Under its source's name, so that the links between the texts lead somewhere.
    _TEXTS[page.file.src_uri] = re.sub(r"^::: (\S+)((?:\n    .*)*)", _documented, markdown, flags=re.MULTILINE)
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links the Markdown of a page at its end."""
    name = Path(page.file.src_uri).name
    return f'{html}\n<p><a rel="alternate" type="text/markdown" href="{name}">This page as Markdown</a></p>\n'


def on_nav(nav: Any, **_: Any) -> None:
    """Keeps the navigation, whose order and titles are those of `llms.txt`."""
    _SECTIONS[:] = nav.items


def on_post_build(config: Any, **_: Any) -> None:
    """Writes the Markdown of the pages, and `llms.txt`."""
    site = Path(config["site_dir"])
    for path, text in _TEXTS.items():
        site.joinpath(path).write_text(text, "utf-8")
    parts = [f"# {config['site_name']}", f"> {config['site_description']}"]
    for section in _SECTIONS:
        parts += [f"## {section.title}", "\n".join(map(_entry, _pages(section)))]
    site.joinpath("llms.txt").write_text("\n\n".join(parts) + "\n", "utf-8")


def _pages(section: Any) -> Iterator[Any]:
    """The pages of a part of the navigation."""
    for item in section.children:
        yield from [item] if item.children is None else _pages(item)


def _entry(page: Any) -> str:
    path = page.file.src_uri
    return f"- [{page.title}]({path}): {first_sentence(_TEXTS[path])}"


def first_sentence(markdown: str) -> str:
    """The first sentence of a page's prose, without marks."""
    prose = re.sub(r"^```.*?^```$|^[#*!|<].*?$", "", markdown, flags=re.MULTILINE | re.DOTALL).strip()
    paragraph = " ".join(prose.split("\n\n")[0].split())
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", re.split(r"(?<=[.:])\s", paragraph)[0])


def _documented(directive: re.Match[str]) -> str:
    """The docstrings that a directive of mkdocstrings stands for, as Markdown."""
    import yaml

    name, options = directive[1], (yaml.safe_load(directive[2]) or {}).get("options", {})
    return "\n\n".join(_docstrings(pydoc.locate(name), name, options.get("members")))


def _docstrings(thing: Any, name: str, members: list[str] | None = None) -> Iterator[str]:
    """Signature and docstring of a name, then of its members: those of the list, else the public ones of its own."""
    if not inspect.ismodule(thing):
        is_error = inspect.isclass(thing) and issubclass(thing, BaseException)  # those of C have no signature
        signature = str(inspect.signature(thing)) if callable(thing) and not is_error else ""
        signature = re.sub(r" at 0x\w+", "", signature)  # of a function that is a default
        yield f"### {name}\n\n```python\n{name.rpartition('.')[2]}{signature}\n```"
    yield inspect.getdoc(thing) or ""
    if members is None and (inspect.ismodule(thing) or inspect.isclass(thing)):
        of = thing.__name__ if inspect.ismodule(thing) else thing.__module__
        own = {key: getattr(thing, key) for key in vars(thing) if not key.startswith("_")}
        members = [
            key for key, value in own.items() if _is_documented(value) and getattr(value, "__module__", of) == of
        ]
    for member in members or []:
        yield from _docstrings(getattr(thing, member), f"{name}.{member}")


def _is_documented(value: Any) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property)


def command_reference() -> str:
    """Every command of `samestep` with its usage, arguments and options, as Markdown."""
    import typer

    from samestep.cli.main import app

    group: Any = typer.main.get_command(app)
    parts = [_parameters("Options of every call", group.params)]
    for name, command in _commands(group):
        parts.append(f"## samestep {name}\n\n{command.help}\n")
        parts.append(f"```text\n{_usage(name, command.params)}\n```\n")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        parts.append(_parameters("Argument", [p for p in arguments if p.help]))
        parts.append(_parameters("Option", options))
    return "\n".join(part for part in parts if part)


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The commands by name; those of a group, `ledger diff`, in the place of the group."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def recipe_table() -> str:
    """Every recipe, as a Markdown table."""
    from samestep.recipes.catalog import NAMES

    return "\n".join(["| recipe | what |", "|---|---|", *(f"| `{name}` | {about} |" for name, about in NAMES.items())])


def recipe_script() -> str:
    """A recipe's script, whole."""
    text = (ROOT / "src" / "samestep" / "recipes" / "lenet.py").read_text("utf-8")
    return f'```python title="my_lenet.py"\n{text}```'


def readme() -> str:
    """The README with links as they are within the documentation; files outside of it are named, without a link."""
    text = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    return re.sub(r"\[([^]]*)\]\((?:[A-Z]+\.md|LICENSE)\)", r"\1", text)


GENERATORS: Mapping[str, Callable[[], str]] = {
    "commands": command_reference,
    "recipes": recipe_table,
    "recipe": recipe_script,
    "readme": readme,
}


def _usage(name: str, parameters: list[Any]) -> str:
    """`samestep train [OPTIONS] RECIPE`."""
    words = ["samestep", name, "[OPTIONS]"]
    words += [p.metavar or p.name.upper() for p in parameters if p.param_type_name == "argument"]
    return " ".join(words)


def _parameters(title: str, parameters: list[Any]) -> str:
    """A table of parameters; nothing where there are none."""
    shown = [p for p in parameters if not p.hidden]
    if not shown:
        return ""
    rows = [f"| {title} | Default | |", "|---|---|---|"]
    for parameter in shown:
        silent = parameter.required or parameter.default is None or parameter.default is False
        default = "" if silent else f"`{parameter.default}`"
        rows.append(f"| {_spelling(parameter)} | {default} | {_escaped(parameter.help or '')} |")
    return "\n".join(rows) + "\n"


def _spelling(parameter: Any) -> str:
    """How a parameter is written: its names and what its value is called."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return f"{names} `{_escaped(parameter.metavar)}`" if parameter.metavar else names


def _escaped(text: str) -> str:
    """Text for a table's cell."""
    return text.replace("|", "\\|")
