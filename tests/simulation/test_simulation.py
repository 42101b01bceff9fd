"""The simulator holds for some seeds, and finds defects that were once in the code, each put back by a twin."""

import grammar
import pytest
from checks import Case, run_script, script
from grammar import Program
from run import Search
from twins import OVER_PROCESSES, TWINS, check_twin, kind_of, put_back, search_for
from worlds import cpu_only

pytestmark = cpu_only("the ranks of the simulator are threads with CPUs")


@pytest.mark.slow  # `make simulate-gate` has these seeds
@pytest.mark.parametrize("kind", ["programs", "faults", "collectives", "membership", "scripts"])
def test_what_a_seed_draws_holds(kind):
    assert Search().smallest(kind, 1, examples=4) is None


def covering():
    """Programs that have each block, data, loss, optimizer, scheduler and precision, several in one."""
    names = "data", "loss", "optimizer", "scheduler", "precision"
    tables = {name: [*dict.fromkeys(grammar.CHOICES[name])] for name in names}
    blocks = grammar.SEVERAL["blocks"][0]
    for number in range(max(map(len, (blocks, *tables.values())))):
        program = Program(
            blocks=(blocks[number % len(blocks)],),
            samples=11,
            microbatches=2,
            epochs=2,
            seed=number,
            second="rmsprop" if number % 5 == 1 else "",
            groups=number % 5 == 2,
            clip=number % 3 == 0,
            hooks=("average",) if number % 2 else (),
            evaluated="" if number % 2 else "classes",
            **{name: table[number % len(table)] for name, table in tables.items()},
        )
        yield grammar.allowed(program)


@pytest.mark.parametrize("program", [*covering()], ids=repr)
def test_each_choice_is_the_same_on_ranks_and_after_a_resume(program):
    run_script(script(Case(program, ("ranks", "resumed"), 2, order=3)))


@pytest.mark.parametrize("name", [name for name in TWINS if kind_of(name) not in OVER_PROCESSES])
def test_a_defect_fails_the_program_that_shows_it(name):
    check_twin(name)


@pytest.mark.parametrize("name", TWINS)
def test_what_a_defect_replaces_is_there(name):
    with put_back(name):
        pass


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TWINS)
def test_a_defect_is_found_by_what_seeds_draw(name):
    assert search_for(name, programs=1000)[-1]
