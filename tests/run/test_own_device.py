"""The device of a rank: which one it is, that it is current, and the CPU threads beside it."""

import json

from gpus import needs_fake_gpus, run

pytestmark = needs_fake_gpus

CHOSEN = """
    import json
    import torch
    from samestep.comm.environment import Environment
    from samestep.engine.rank_device import own_device

    def choose(asked, *place):
        own = own_device(asked, Environment(*place))
        made = torch.empty(1, device="cuda")
        return [str(own), torch.accelerator.current_device_index(), str(made.device)]

    found = {
        "its own": [choose("cuda", rank, 4, rank, 4)[0] for rank in range(4)],
        "explicit": choose("cuda:3", 0, 2, 0, 2),
        "one a process": choose("cuda", 5, 8, 5, 8)[0],
        "alone": choose("cuda"),
        "nothing said": choose(None),
    }
    print(json.dumps(found))
"""


def test_each_rank_has_the_device_of_its_local_rank_unless_it_names_another_and_it_is_current():
    found = json.loads(run(CHOSEN, devices=4))
    assert found["its own"] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert found["explicit"] == ["cuda:3", 3, "cuda:3"]
    assert found["one a process"] == "cuda:1"
    assert found["alone"] == found["nothing said"] == ["cuda:1", 1, "cuda:1"], "as in torch: the current device"


RUN = """
    import torch
    from samestep.comm.communicator import Communicator
    from samestep.comm.transport import LocalTransport
    from samestep.run.run import Run

    alone = LocalTransport()
    given = Communicator(torch.device("cuda:1"), alone, alone)
    for arguments in ({"device": "cuda:2"}, {"communicator": given}):
        print(Run(8, **arguments).device, torch.accelerator.current_device_index())
"""


def test_the_device_of_a_run_is_current():
    assert run(RUN, devices=4) == "cuda:2 2\ncuda:1 1\n"


THREADS = """
    import torch
    from samestep.run.run import Run

    made = Run(8, device="cuda")
    print(torch.get_num_threads(), made.contract.num_threads, torch.randn(1 << 20).sum().item().hex())
"""


def test_what_the_cpu_computes_for_a_gpu_does_not_depend_on_the_cores():
    """A sum of many numbers is split by the number of threads."""
    few, many = (run(THREADS, devices=1, OMP_NUM_THREADS=str(count)) for count in (1, 2))
    assert few == many
    assert few.startswith("1 1 ")
