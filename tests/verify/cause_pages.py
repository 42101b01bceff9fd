"""The pages of the causes in the documentation: a script with each, the command and its output, and the cure."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "causes"
OVERVIEW = (FOLDER / "index.md").read_text(encoding="utf-8")
PAGES = dict(re.findall(r"^\| \[`(\w+)`\]\(([^)]+)\)", OVERVIEW.partition("## ")[2], re.MULTILINE))
"""The place in the documentation that has a script with a cause, and its cure; by key."""


def section(key):
    """What the documentation has on a cause: the script, the command, its output, the cured script if there is one."""
    path, _, anchor = PAGES[key].partition("#")
    text = (FOLDER / path).read_text(encoding="utf-8").split(f"\n## {anchor}\n")[1].split("\n## ")[0]
    (script,) = re.findall(rf'^```python title="cause_{key}.py"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    ((command, output),) = re.findall(r'^```text title="([^"]+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    cured = None
    for lines in re.findall(r"^```diff\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL):
        old, new = ("\n".join(line[1:] for line in lines.split("\n") if line[0] in f" {sign}") for sign in "-+")
        assert script.count(old) == 1
        cured = script.replace(old, new)
    return script, command.split(), output, cured
