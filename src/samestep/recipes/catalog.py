"""The recipes of `samestep train`, each a script in this folder; torch-free."""

from collections.abc import Mapping

from samestep.checks import check_choice

NAMES: Mapping[str, str] = {
    "lenet": "LeNet on 28 by 28 images: digits (embedded), or a folder of IDX files such as MNIST's",
    "mlp": "regression on a table of numbers: diabetes (embedded), or a CSV file",
    "simplenet": "one hidden layer on 28 by 28 images, as for lenet",
    "vgg": "VGG-11 with BatchNorm and dropout on images up to 32 by 32, as for lenet",
    "gpt": "a small GPT over bytes: Python's language reference (embedded), or a text file",
}
"""Each recipe's name, and what it trains."""


def module_of(name: str) -> str:
    """The module that is the script of a recipe; a `UsageError` that names the recipes if there is none."""
    check_choice("NAME", name, NAMES, option="")
    return f"{__package__}.{name}"


MODULES = tuple(map(module_of, NAMES))
"""The modules of all recipes: what a record may name without being trusted."""
