"""The page of the causes and their smallest scripts: a script with each, the command and its output, and the cure."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "causes.md"
TEXT = PAGE.read_text(encoding="utf-8")
SCRIPTS = (HERE / "cause_scripts.md").read_text(encoding="utf-8")
KEYS = re.findall(r"^\| \[`(\w+)`\]\(#\1\)", TEXT, re.MULTILINE)


def cure(key):
    """The lines that the page takes out of the script (-) and puts in (+): none, or one block."""
    text = re.split(rf"^### {key}\n", TEXT, flags=re.MULTILINE)[1]
    return re.findall(r"^```diff\n(.*?)\n```$", re.split("^##", text, flags=re.MULTILINE)[0], re.MULTILINE | re.DOTALL)


def changed(script, lines):
    """A script without the lines of a block that begin with -, and with those that begin with +."""
    old, new = ("\n".join(line[1:] for line in lines.split("\n") if line[0] in f" {sign}") for sign in "-+")
    assert script.count(old) == 1
    return script.replace(old, new)


def section(key):
    """The smallest script with a cause, the command, its output, and the cured script if there is one."""
    text = SCRIPTS.split(f"\n## {key}\n")[1].split("\n## ")[0]
    (script,) = re.findall(rf'^```python title="cause_{key}.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    ((command, output),) = re.findall(r'^```text title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    cured = None
    for lines in cure(key):
        cured = changed(script, lines)
    return script, command.split(), output, cured
