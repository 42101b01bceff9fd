"""Reading a script without running it: whether it deals with ranks itself."""

from textwrap import dedent

import pytest

from samestep.launcher.job import DYNAMO, TRAINING
from samestep.scripts.script_analysis import MAX_FILES, reads_as


@pytest.fixture
def folder(tmp_path):
    """`folder({"a.py": …})` writes files, and gives the folder."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return tmp_path

    return write


def read(folder, text, **others):
    return reads_as(folder({"train.py": text, **others}) / "train.py")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch.distributed as dist\ndist.init_process_group('gloo')", "train.py, line 2, calls init_process"),
        ("from torch.distributed import *\ninit_process_group()", "calls init_process_group"),
        ("from torch.distributed import init_process_group as go\nif 1:\n  go()", "line 3, calls init_process_group"),
        (
            "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2,))",
            "init_device_mesh",
        ),
        ("import samestep\nrun = samestep.Run(8)", "uses samestep.Run"),
        ("import samestep as s\ns.Trainer", "uses samestep.Trainer"),
        ("from samestep import launch", "imports samestep.launch"),
        ("from samestep.run.run import Run", "imports samestep.run.run"),
        ("from samestep.run import trainer", "imports samestep.run"),
        ("import accelerate", "imports accelerate"),
        ("from lightning.pytorch import Trainer", "imports lightning"),
        ("def f():\n    import deepspeed", "line 2, imports deepspeed"),
        ("import ray.train", "imports ray"),
        ("from transformers import AutoModel, Trainer", "imports transformers.Trainer"),
        ("import os\nrank = int(os.environ['RANK'])", "reads RANK from the environment"),
        ("import os\nos.environ.get('LOCAL_RANK', 0)", "reads LOCAL_RANK"),
        ("from os import environ as env, getenv as g\n'RANK' in env", "reads RANK"),
        ("from os import getenv as g\ng('WORLD_SIZE')", "reads WORLD_SIZE"),
        ("if __name__ == '__main__':\n    import ray", "imports ray"),
    ],
)
def test_a_script_that_deals_with_ranks_is_a_multi_process_one(folder, text, reason):
    reading = read(folder, text)
    assert reading.kind == "multi-process"
    assert reason in reading.reason
    is_one = "imports" in reason and "samestep" not in reason
    assert ("python has one rank: --single-process" in reading.reason) == is_one


MAKES = "import torch.distributed as dist, torch.multiprocessing as mp\ndef rank(i):\n  dist.init_process_group()\n"


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("mp.spawn(rank)", "train.py, line 4"),
        ("import torch\ntorch.multiprocessing.start_processes(fn=rank)", "train.py, line 5"),
        ("from torch.multiprocessing import spawn as go\ndef demo(f):\n  go(f, nprocs=2)\ndemo(rank)", "line 6"),
        ("def outer(i):\n  rank(i)\nmp.spawn(outer)", "line 6"),
        ("mp.spawn(lambda i: rank(i))", "line 4"),
        ("for i in range(2): mp.get_context('spawn').Process(target=rank, args=(i,)).start()", "line 4"),
        ("from multiprocessing import Process as P\nP(target=rank)", "line 5"),
        ("class Job:\n  def __init__(self): rank(0)\ndef run(i): Job()\nmp.spawn(run)", "line 7"),
        ("class Rank(mp.Process):\n  def run(self): rank(0)\nRank().start()", "line 4"),
        ("import functools\nmp.spawn(functools.partial(rank))", "line 5"),
        ("class Job:\n  def run(self): rank(0)\n  def go(self): mp.Process(target=self.run)\nJob()", "line 6"),
        ("import os\nmp.Process(target=os.getpid).start()\nrank(0)", ""),
        ("def fetch(): pass\nmp.Process(target=fetch).start()\nrank(0)", ""),
        ("def cut(i): open('x')\nmp.spawn(cut, nprocs=8)\nrank(0)", ""),
        ("import psutil\npsutil.Process(3)\nmp.Pool(2)\nrank(0)", ""),
    ],
)
def test_a_script_that_starts_ranks_itself_is_told_from_one_that_starts_other_processes(folder, text, sign):
    reading = read(folder, MAKES + text)
    assert reading.kind == "multi-process"
    assert [place.endswith(sign) for place in reading.starts] == ([True] if sign else [])
    assert not reading.reads_ranks
    assert read(folder, f"{MAKES}{text}\nimport os\nos.environ.get('RANK')").reads_ranks


def test_a_function_of_another_module_starts_ranks(folder):
    own = {
        "ranks.py": "import torch.distributed as dist\ndef go(i):\n  setup()\ndef setup(): dist.init_process_group()\n"
    }
    assert read(folder, "import torch.multiprocessing as mp\nfrom ranks import go\nmp.spawn(go)", **own).starts
    assert not read(
        folder, "import torch.multiprocessing as mp\nfrom ranks import go\ndef cut(i): pass\nmp.spawn(cut)", **own
    ).starts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(1, 1))",
        "import samestep\nsamestep.DataParallel(net)",
        "from samestep import DataParallel\nfrom samestep.tutorial import split_and_load, allreduce",
        "import samestep.tutorial\nsamestep.metrics",
        "from transformers import AutoModel",
        "import os\nos.environ['RANK'] = '0'\nos.environ['CUDA_VISIBLE_DEVICES']\nrank = os.environ.get('HOME')",
        "RANK = {'RANK': 1}['RANK']\nx = Run(3)\nlaunch = 1",
        "# init_process_group\ntext = 'import accelerate'",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import accelerate",
        "try:\n    import horovod\nexcept ImportError:\n    horovod = None",
    ],
)
def test_a_script_for_one_process_is_a_single_process_one(folder, text):
    assert read(folder, text).kind == "single-process"


def test_the_reason_says_what_will_be_shared_out(folder):
    reading = read(folder, "from torch.nn import DataParallel as DP\n\nmodel = DP(net)\n")
    assert reading.reason == "it has DataParallel (train.py, line 3), and starts no process group"
    assert reads_as(folder({"train.py": "class Mine(torch.nn.DataParallel): pass"}) / "train.py").reason.startswith(
        "it has DataParallel (train.py, line 1)"
    )
    assert read(folder, "args.data_parallel = isinstance(net, nn.DataParallel)").reason == (
        "nothing in its file deals with ranks"
    )


def test_a_script_that_has_both_is_a_multi_process_one_and_told_how_to_share_its_wrapper_out(folder):
    text = """
    import torch, torch.distributed as dist
    if args.distributed:
        dist.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        model = torch.nn.DataParallel(model)
    """
    reading = read(folder, text)
    assert reading.kind == "multi-process"
    assert "line 4, calls init_process_group" in reading.reason
    assert "DataParallel (train.py, line 7), which samestep run --single-process shares out instead" in reading.reason


def test_modules_of_the_scripts_own_folder_count_however_they_are_imported(folder):
    where = folder({"package/__init__.py": "", "package/ranks.py": "import accelerate", "start.py": "import ray"})
    for text in (
        "import start",
        "from start import *",
        "def f():\n    from package.ranks import something",
        "from package import ranks",
        "import package.ranks as r",
    ):
        assert read(folder, text).kind == "multi-process", text
    folder({"package/__init__.py": "from . import ranks"})
    assert read(folder, "import package.other").kind == "multi-process"
    folder({"package/__init__.py": "", "package/deep/__init__.py": "", "package/deep/own.py": "from ..ranks import x"})
    reading = reads_as(folder({"train.py": "from package.deep import own"}) / "train.py")
    assert reading.reason.startswith("ranks.py, line 1, imports accelerate")
    assert read(folder, "import elsewhere, torch").kind == "single-process"
    assert where.is_dir()


def test_what_an_imported_module_does_as_a_script_does_not_count(folder):
    others = {"tool.py": "if __name__ == '__main__':\n    import ray\nelse:\n    x = 1"}
    assert read(folder, "import tool", **others).kind == "single-process"


def test_a_module_of_ones_own_is_no_framework(folder):
    assert read(folder, "import composer", **{"composer.py": "notes = 1"}).kind == "single-process"
    assert read(folder, "from composer import Trainer", **{"composer.py": "import ray"}).kind == "multi-process"


@pytest.mark.parametrize("content", [b"def f(:\n", b"\xff\xfe\x00", b"x = 1\x00", b"(" * 5000, None])
def test_what_cannot_be_parsed_is_left_to_python(tmp_path, content):
    path = tmp_path / "train.py"
    if content is not None:
        path.write_bytes(content)
    reading = reads_as(path)
    assert reading.kind == "single-process"
    assert "Python will say why" in reading.reason


def test_a_source_in_another_encoding_is_read_without_a_word(tmp_path, recwarn):
    path = tmp_path / "train.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nname = 'é\\d'\nimport ray\n".encode("latin-1"))
    assert reads_as(path).kind == "multi-process"
    assert not recwarn.list


def test_a_circle_of_imports_and_a_large_folder_come_to_an_end(folder):
    files = {f"m{k}.py": f"import m{k + 1}, m{max(k - 1, 0)}, train" for k in range(MAX_FILES + 20)}
    reading = read(folder, "import m0", **files)
    assert reading.reason == f"nothing in any of its {MAX_FILES} files deals with ranks"


def test_a_module_is_found_as_python_finds_it_and_is_not_imported(folder, monkeypatch):
    where = folder(
        {
            "package/__init__.py": "raise SystemExit('imported')",
            "package/__main__.py": "from package import work",
            "package/work.py": "import accelerate",
            "package/quiet.py": "",
            "single.py": "import ray",
        }
    )
    monkeypatch.chdir(where)
    assert reads_as("package", is_module=True).reason.startswith("work.py, line 1, imports accelerate")
    assert reads_as("package.quiet", is_module=True).kind == "single-process"
    assert reads_as("single", is_module=True).kind == "multi-process"
    assert reads_as("nowhere.at.all", is_module=True).kind == "single-process"


def test_an_installed_module_is_not_judged_by_the_libraries_around_it(folder, monkeypatch, tmp_path):
    where = folder({"lib/tool/__init__.py": "", "lib/tool/__main__.py": "import other", "lib/other.py": "import ray"})
    folder({"lib/tool/start.py": "from tool.ranks import x", "lib/tool/ranks.py": "import ray"})
    monkeypatch.syspath_prepend(str(where / "lib"))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert reads_as("tool", is_module=True).kind == "single-process"
    assert reads_as("tool.start", is_module=True).kind == "multi-process"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import ignite.distributed as idist\nwith idist.Parallel('gloo'): pass", "uses ignite.distributed.Parallel"),
        ("from ignite.distributed import Parallel", "imports ignite.distributed.Parallel"),
        ("import timm\ntimm.utils.init_distributed_device(0)", "line 2, uses timm.utils.init_distributed_device"),
        ("from timm import utils\nutils.init_distributed_device(0)", "uses timm.utils.init_distributed_device"),
        ("import transformers\nclass Own(transformers.Trainer): pass", "line 2, uses transformers.Trainer"),
        ("from sentence_transformers import SentenceTransformerTrainer", "SentenceTransformerTrainer"),
        ("import timm\ntimm.create_model('x')", ""),
        ("from transformers import BertConfig, BertModel\nBertModel(BertConfig())", ""),
        ("import torchmetrics, datasets\ntorchmetrics.MeanMetric()\ndatasets.load_dataset('x')", ""),
        ("from ignite.engine import create_supervised_trainer\ncreate_supervised_trainer()", ""),
    ],
)
def test_of_libraries_those_count_that_the_table_names(folder, text, reason):
    reading = read(folder, text)
    assert (reading.kind == "multi-process") == bool(reason), reading.reason
    assert reason in reading.reason


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("run = samestep.Run(64)", 8),
        ("run = samestep.Run(global_batch_size=args.batch)", 8),
        ("run = samestep.Run(64, 3)", 3),
        ("run = samestep.Run(64, num_microbatches=32)", 32),
        ("run = samestep.Run(64, num_microbatches=None)", 8),
        ("samestep.Run(64, 4)\nsamestep.Run(64, 2)", 2),
        ("run = samestep.Run(64, args.microbatches)", None),
        ("run = samestep.Run(64, **options)", None),
        ("samestep.Run(64, 4)\nsamestep.Run(64, many)", None),
        ("samestep.launch(train)", None),
    ],
)
def test_the_microbatches_of_a_script_are_read_where_they_are_written_out(folder, text, count):
    assert read(folder, f"import samestep\n{text}").num_microbatches == count


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("dist.init_process_group('gloo')", False),
        ("dist.init_process_group('nccl')", True),
        ("torch.cuda.set_device(0)", True),
        ("model = model.cuda(rank)", True),
        ("device = torch.device('cuda', rank)", True),
        ("from torch.cuda.amp import GradScaler", True),
        ("device = torch.accelerator.current_accelerator()", True),
        ("trainer = Trainer(accelerator='gpu', devices=4)", True),
        ("trainer = Trainer(accelerator='cpu', devices=4)", False),
        ("arguments = TrainingArguments(fp16=True)", True),
        ("accelerator = Accelerator()\nx = x.to(accelerator.device)", False),
        ("'''Runs on CPUs: without cuda, nccl or gpu.'''  # cuda", False),
        ("import own", True),
    ],
)
def test_a_script_is_one_for_gpus_if_it_names_them(folder, text, is_named):
    own = {"own.py": "def place(x):\n    return x.cuda()"}
    assert read(folder, f"import os\nrank = os.environ['RANK']\n{text}\n", **own).names_gpus == is_named
    assert read(folder, text, **own).names_gpus == is_named, "under --multi-process"


@pytest.mark.parametrize(
    ("text", "preload"),
    [
        ("import torch\ntorch.optim.SGD", [DYNAMO]),
        ("from torch.optim import AdamW", [DYNAMO]),
        ("import torch\ntorch.compile(model)", [DYNAMO]),
        ("model.compile()", [DYNAMO]),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", [DYNAMO]),
        ("import own\nown.train()", [DYNAMO]),
        ("import pytest", [DYNAMO]),
        ("try:\n  import psutil\nexcept ImportError:\n  pass", [DYNAMO]),
        ("import samestep\nsamestep.Run(8)\nmake_optimizer()", list(TRAINING)),
        ("from samestep import Mean", [TRAINING[-1]]),
        ("import torch.distributed as dist\ndist.init_process_group('gloo')", []),
        ("import re, json\nimport numpy as np\nre.compile('optim')", []),
        ("code = compile('1', 'optim', 'eval')", []),
        ("# an optimizer would be here", []),
        ("try:\n  import not_installed_here\nexcept ImportError:\n  pass", []),
        ("import __main__", []),
        ("import other", []),
        ("def f(:", []),
    ],
)
def test_the_modules_to_import_before_the_fork_are_those_that_the_script_shows(folder, text, preload):
    own = "from torch import nn\ndef train():\n    return nn.optimizer"
    assert list(read(folder, text, **{"own.py": own, "other.py": "VALUE = 7"}).preload) == preload
