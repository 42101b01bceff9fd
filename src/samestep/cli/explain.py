"""`samestep explain`: the documentation's section on a cause that `samestep verify` names."""

import re
from pathlib import Path
from typing import Annotated

import typer

from samestep.checks import check_choice
from samestep.text import make_console

PACKAGE = Path(__file__).parents[1]
PAGES = [root / "docs" / "causes.md" for root in (PACKAGE, PACKAGE.parents[1])]  # of a wheel, of a checkout


def explain(
    cause: Annotated[str | None, typer.Argument(help="A cause that samestep verify names; without it, all.")] = None,
) -> None:
    """Explains a CAUSE that samestep verify has named: its sign, its reason, its cure."""
    from rich.markdown import Markdown

    page = next(page for page in PAGES if page.is_file()).read_text(encoding="utf-8")
    intro, *sections = re.split(r"^##+ ", page, flags=re.MULTILINE)
    if cause is not None:
        check_choice("CAUSE", cause, re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE), option="")
    text = next(section for section in sections if section.startswith(f"{cause or 'All causes'}\n"))
    text = intro + "## " + text if cause is None else "# " + text
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links lead nowhere in a terminal
    console = make_console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text.rstrip("\n"), flush=True)  # the console prints a text as one line
