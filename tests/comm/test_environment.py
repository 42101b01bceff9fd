"""The environment of a rank, by the variables of each launcher."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm.environment import Environment, WorkerSettings, read_environment
from samestep.errors import UsageError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-a"}
TORCHRUN |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x"}
TORCHRUN |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[03-05,9],x1"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "3", "LOCAL_SIZE": "4"}.items()
}
OPEN_MPI |= {"PMIX_NAMESPACE": "prterun-node-77@1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": " 4000 "}
OF_SUPERCOMPUTERS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "MASTER_ADDR": "a"}
DAEMON = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}  # of mpirun, in a job of Slurm's
PLACES = [  # the variables, rank, world size, local rank and local world size; the launcher, and where the store is
    (TORCHRUN, (5, 8, 1, 4), "torchrun", "node-a"),
    ({**SLURM, **OPEN_MPI, **TORCHRUN}, (5, 8, 1, 4), "torchrun", "node-a"),
    (BY_HAND, (1, 2, 1, 2), "other", "10.0.0.1"),
    ({**BY_HAND, "LOCAL_WORLD_SIZE": "1"}, (1, 2, 0, 1), "other", "10.0.0.1"),
    (SLURM, (5, 8, 1, 4), "slurm", "gpu03"),
    ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "9"}, (5, 8, 1, 4), "slurm", "a"),
    ({**SLURM, "WORLD_SIZE": "8"}, (5, 8, 1, 4), "slurm", "gpu03"),  # which a batch script may export
    (OPEN_MPI, (3, 4, 3, 4), "mpi", "127.0.0.1"),
    ({**DAEMON, **OPEN_MPI}, (3, 4, 3, 4), "mpi", "127.0.0.1"),
    (MPICH, (1, 2, 1, 2), "mpi", "127.0.0.1"),
    ({**DAEMON, **MPICH}, (1, 2, 1, 2), "mpi", "127.0.0.1"),
    (OF_SUPERCOMPUTERS, (5, 8, 1, 4), "mpi", "a"),
]
ALONE = [  # of one process
    {},
    {"RANK": "0", "WORLD_SIZE": "1"},
    {"WORLD_SIZE": "1"},
    {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # an allocation without a step
]


def place(environment):
    """The four numbers."""
    return environment.rank, environment.world_size, environment.local_rank, environment.local_world_size


@pytest.mark.parametrize(("variables", "numbers", "launcher", "address"), PLACES)
def test_each_launcher_gives_the_ranks_and_the_place_of_the_store(variables, numbers, launcher, address):
    found = read_environment(variables)
    assert (place(found), found.launcher, found.master_addr) == (numbers, launcher, address)


@pytest.mark.parametrize("variables", ALONE)
def test_other_variables_are_those_of_a_single_process(variables):
    assert place(read_environment(variables)) == place(Environment()) == (0, 1, 0, 1)


def test_ports_are_those_that_are_said_and_a_store_is_kept_by_torchrun_and_samestep_alone():
    environment = read_environment(TORCHRUN)
    assert (environment.master_port, environment.store_is_kept, environment.settings) == (29500, True, WorkerSettings())
    told = WorkerSettings("cpu", 3, slot=1, heals=False, device_index=2, fds={"devices": 5})
    environment = read_environment({**TORCHRUN, **told.variables()})
    assert (environment.launcher, environment.settings) == ("samestep", told)
    environment = read_environment(BY_HAND)
    assert (environment.master_port, environment.store_is_kept) == (4000, False)
    assert read_environment({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "9"}).master_port == 9


def test_srun_says_how_many_tasks_are_on_this_node():
    for tasks, node, local in [("8", 0, 8), ("6,2", 1, 2), ("2(x2),4", 2, 4), ("2(x2),4", 1, 2), ("3(x2),2", 2, 2)]:
        variables = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
        assert read_environment(variables).local_world_size == local
    bare = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    assert read_environment({**bare, "SLURM_NTASKS_PER_NODE": "2"}).local_world_size == 2
    assert read_environment(bare).local_world_size == 8


def test_the_first_host_of_a_slurm_node_list():
    for nodes, first in {
        "n1": "n1",
        "n1,n2": "n1",
        "a1,gpu[01-02]": "a1",
        "gpu[03-05,9],x1": "gpu03",
        "gpu[7,9]": "gpu7",
        "gpu[7-9]-ib,x": "gpu7-ib",
        "rack[1-2]n[4,7]": "rack1n4",
    }.items():
        assert read_environment({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize("own", [{"PMI_FD": "6"}, {"HYDI_CONTROL_FD": "9"}, {"PMI_ID": "1"}, {"SLURM_STEP_ID": "3"}])
def test_all_ranks_of_an_mpi_job_derive_the_same_port(own):
    """From nothing that differs between its processes."""
    for job in (OPEN_MPI, MPICH):
        assert read_environment({**job, **own}).master_port == read_environment(job).master_port


def test_two_jobs_derive_different_ports():
    assert read_environment(SLURM).master_port != read_environment({**SLURM, "SLURM_JOB_ID": "8"}).master_port
    assert read_environment(SLURM).master_port != read_environment({**SLURM, "SLURM_STEP_ID": "1"}).master_port
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node-78@1"}
    assert read_environment(OPEN_MPI).master_port != read_environment(other).master_port


@given(st.integers(1, 10**9), st.integers(0, 100))
def test_a_derived_port_needs_no_privilege_and_lies_below_the_ephemeral_ones(job, step):
    environment = read_environment({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
    assert 1024 <= environment.master_port < 32_768


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 and WORLD_SIZE=8; the rank must be below"),
        *(({**TORCHRUN, "RANK": wrong}, f"RANK is '{wrong}'; it must be a number") for wrong in ("-1", "two", "", "²")),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "RANK=5 and WORLD_SIZE=0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 and WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 and WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'; it must be a number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000; it must be at most 65535"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "WORLD_SIZE=8 but no MASTER_PORT"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "no MASTER_PORT"),
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "needs MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'"),
    ],
)
def test_variables_that_cannot_be_or_are_missing_are_named(variables, message):
    with pytest.raises(UsageError, match=message):
        read_environment(variables)


@pytest.mark.parametrize(
    ("field", "values", "wrong"), [("transport", ("auto", "gloo", "shared"), "nccl"), ("nodes", ("auto", "flat"), "2")]
)
def test_the_transport_and_the_reduction_by_nodes_can_be_chosen(field, values, wrong):
    name = f"SAMESTEP_{field.upper()}"
    assert getattr(read_environment(TORCHRUN), field) == "auto"
    for value in values:
        assert getattr(read_environment({**TORCHRUN, name: value}), field) == value
    assert getattr(read_environment({**TORCHRUN, name: ""}), field) == "auto"
    with pytest.raises(UsageError, match=f"got {name}='{wrong}'; it is one of {', '.join(values)}"):
        read_environment({**TORCHRUN, name: wrong})
