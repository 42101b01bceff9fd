"""Small scripts for one process with state in unusual places, what each must give, and a table of what it does give.

A device that computes a chunk of a forward with an old value of a global variable, a closure cell, a class attribute, a
table, a hook, … is wrong without a word. Each program here has such a state, and most change it after the forwards that
are checked at length; lines that end in `# change` do. Without them its results are others, in `python` too.

    python tests/scripts/stateful_programs.py [--only PART_OF_A_NAME] [--devices 1 2 3] [--jobs 2]
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from state_in_calls import DRAWS, HOOKS, MODES, WRITES
from state_in_code import ATTRIBUTES, FUNCTIONS, GLOBALS
from state_in_training import COMPUTING, STRUCTURE, USES
from stateful_program import DEVICES, is_expected, try_program

IN_DATA_PARALLEL = {
    *("global float", "global of a package", "sentinel", "lru_cache", "closure cell", "name made of parts"),
    *("functional patched", "class attribute", "float of the module", "NumPy table of the module"),
    *("NumPy table of the script", "functions in a plain list", "train and eval", "draws of Python", "draws of torch"),
    *("draws of a generator of the module", "draws of an iterator", "forward that counts on itself"),
    *("forward that counts in a global", "forward that keeps values in a global dict", "forward that prints"),
    *("forward that keeps a part of its loss", "hook on a child, added and removed", "hook that keeps features"),
    *("hook on a parameter", "loss of features of a hook", "adapter added", "layer replaced", "frozen", "GAN"),
    *("state loaded", "tied weights", "weight norm", "recurrent state as an argument", "LBFGS", "rate of dropout"),
    *("penalty on the gradient of the inputs", "argument that is an object", "output that is a dataclass", "grad mode"),
    *("hook whose state changes", "teacher in the forward", "teacher in a global", "checkpointing", "process id"),
}
NOT_PYTHON = {  # whose writes inside the forward are lost, as with torch's DataParallel on several devices
    "forward that keeps a part of its loss",
    "forward that keeps values in a global dict",
}


def _all():
    plain = [*GLOBALS, *FUNCTIONS, *ATTRIBUTES, *MODES, *DRAWS, *WRITES, *HOOKS, *STRUCTURE, *COMPUTING, *USES]
    for program in plain:
        yield program
        if program.name in IN_DATA_PARALLEL:
            python = program.python and program.name not in NOT_PYTHON
            yield replace(program, name=f"{program.name}, in DataParallel", data_parallel=True, python=python)


PROGRAMS = {program.name: program for program in _all()}


def main() -> None:
    """Prints a row a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    chosen = [program for program in PROGRAMS.values() if args.only in program.name]
    failed = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        tried = pool.map(lambda program: try_program(program, args.devices), chosen)
        for program, (verdict, runs, seconds, near) in zip(chosen, tried, strict=True):
            is_good = is_expected(program, verdict, runs)
            failed += not is_good
            said = next((run.sentence for run in runs.values() if run.code), "")
            if not said:
                said = next(
                    (line for run in runs.values() for line in run.stderr.splitlines() if "whole on" in line), ""
                )
            columns = (program.name, "|".join(program.expect.verdicts), "" if is_good else "!!", verdict, near)
            print("{:58} {:20} {:2} {:10} {:5}".format(*columns), f"{seconds:5.1f} s", said[:300], flush=True)
    print(f"{len(chosen)} programs, {failed} not as expected")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
