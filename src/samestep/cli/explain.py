"""`samestep explain`: the documentation's section on a cause that `samestep verify` names."""

import re
from pathlib import Path
from typing import Annotated

import typer

from samestep.checks import check_choice
from samestep.text import make_console

PACKAGE = Path(__file__).parents[1]
FOLDERS = [root / "docs" / "causes" for root in (PACKAGE, PACKAGE.parents[1])]  # of a wheel, of a checkout


def explain(
    cause: Annotated[str | None, typer.Argument(help="A cause that samestep verify names; without it, all.")] = None,
) -> None:
    """Shows why results depend on the devices by a CAUSE: its sign, the smallest script that has it, its cure."""
    from rich.markdown import Markdown

    folder = next(folder for folder in FOLDERS if folder.is_dir())
    text = (folder / "index.md").read_text(encoding="utf-8")
    pages = dict(re.findall(r"^\| \[`(\w+)`\]\(([\w-]+\.md)#", text, re.MULTILINE))
    if cause is not None:
        check_choice("CAUSE", cause, pages, option="")
        section = (folder / pages[cause]).read_text(encoding="utf-8").partition(f"\n## {cause}\n")[2]
        text = f"# {cause}\n" + section.partition("\n## ")[0]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links lead nowhere in a terminal
    text = re.sub(r'^```(\w+) title="(.*)"$', r"`\2`\n\n```\1", text, flags=re.MULTILINE)
    console = make_console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text.rstrip("\n"), flush=True)  # the console prints a text as one line
