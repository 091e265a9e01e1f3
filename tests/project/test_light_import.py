"""`import kvlab` is quick and changes nothing in the process; commands and jobs set their variables themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvlab import methods
from kvlab.errors import KvlabError
from kvlab.lib import policy_names

SET = ("GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "MLFLOW_DISABLE_TELEMETRY")
OWN = {*SET, "DO_NOT_TRACK", "OMP_WAIT_POLICY"}

# Libraries change more in a process when they are imported; they come first.
COMPARED = """
import logging, os, signal, sys, warnings
import numpy, pandas, pydantic, scipy.stats, torch, torch.utils._python_dispatch, tqdm.auto, transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

def state():
    loggers = [logging.getLogger(name) for name in (None, *logging.root.manager.loggerDict)]
    return {
        "variables": dict(os.environ),
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "filters": list(map(str, warnings.filters)),
        "showing": (warnings.showwarning.__module__, warnings.formatwarning.__module__),
        "handlers": {logger.name: list(map(str, logger.handlers)) for logger in loggers if logger.handlers},
        "levels": {logger.name: logger.level for logger in loggers if logger.level},
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "hook": str(sys.excepthook),
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "random": hash(torch.get_rng_state().numpy().tobytes()),
    }

before = state()
import kvlab
assert state() == before, "the import"
policy = kvlab.policy("snapkv", budget=40)
lm = kvlab.random_lm("tiny-llama-gqa")
trace = kvlab.capture(lm, torch.arange(3, 67), new_tokens=4)
replay = kvlab.replay(trace, policy)
assert len(replay.table)
with kvlab.compress(lm, policy):
    lm.model.generate(torch.arange(3, 67)[None], max_new_tokens=2, do_sample=False)
import kvlab.workbench.store.tracking
after = state()
assert after == before, {name: (before[name], after[name]) for name in before if before[name] != after[name]}
"""


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OWN}


def test_importing_and_using_kvlab_changes_nothing_in_the_process():
    done = subprocess.run([sys.executable, "-c", COMPARED], env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_import_takes_less_than_a_fifth_of_a_second():
    code = "import time; start = time.process_time(); import kvlab; print(time.process_time() - start)"
    took = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
    assert min(took) < 0.2


OWNERS = {
    "a command": "from kvlab import cli\ntry: cli.main(['list', 'storages'])\nexcept SystemExit: pass",
    "a job": "import runpy, sys\nsys.argv = ['worker', '/nowhere']\n"
    "try: runpy.run_module('kvlab.workbench.jobs.worker', run_name='__main__')\nexcept OSError: pass",
    "the server of warm jobs": "from kvlab.workbench.jobs import fork_server\nfork_server.Server = None\n"
    "try: fork_server.main()\nexcept TypeError: pass",
}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_process_of_its_own_sets_its_variables_and_leaves_the_users(owner):
    told = "import json, os, sys\nprint(json.dumps(dict(os.environ)), file=sys.stderr)"
    given = clean() | {"LRU_CACHE_CAPACITY": "77"}
    code = f"{OWNERS[owner]}\n{told}"
    done = subprocess.run([sys.executable, "-c", code, "0"], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr.splitlines()[-1])
    assert {name: found.get(name) for name in SET} == dict(zip(SET, ("2000", "256", "77", "true"), strict=True))


MISTAKEN = {
    "eval needle --policies nosuch": "unknown policy 'nosuch'; known are: adakv,",
    "bench decode --policies snapkv,snapk": "unknown policy 'snapk'; did you mean 'snapkv'",
    "bench nosuch": "unknown benchmark 'nosuch'; known are: decode,",
    "pages --only nosuch": "unknown policy 'nosuch'; known are: adakv,",
    "eval nosuch": "unknown task 'nosuch'; known are: aime,",
    "eval needle -p nosuch=1": "needle: unknown parameter 'nosuch'; known are: depths,",
    "eval needle -p document=nosuch": "there is no document or text file nosuch;",
    "compile --documents nosuch": "there is no document or text file nosuch;",
    "explore sotu/1962 --policies snapkv,dap": "unknown policy 'dap'; did you mean 'dapq'",
    "explore sotu/1962 --policies snapkv": "a page shows 2 to 4 different policies, not 1",
    "explore nosuch": "there is no document or text file nosuch;",
    "run explore -p nosuch=1": "unknown parameter of explore 'nosuch'; known are: budget,",
}


def test_a_mistaken_name_is_refused_before_torch_is_imported():
    code = (
        "import sys\nfrom kvlab import cli\n"
        "for line in sys.argv[1:]:\n"
        "    try: cli.main(line.split())\n"
        "    except SystemExit as left: assert left.code == 1\n"
        "    assert 'torch' not in sys.modules, line"
    )
    done = subprocess.run([sys.executable, "-c", code, *MISTAKEN], env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for told, expected in zip(done.stderr.splitlines(), MISTAKEN.values(), strict=True):
        assert told.startswith(f"kvlab: {expected}")


def test_the_names_known_without_torch_are_those_of_the_policies():
    assert policy_names.own() == [cls.name for cls in methods._own()]


def test_a_workspace_with_policies_decides_itself_which_there_are(project):
    with pytest.raises(KvlabError, match="unknown policy 'mine'"):
        policy_names.check(["mine"])
    (project / "pyproject.toml").write_text("[tool.kvlab]\nworkspace = true\n")
    (project / "policies").mkdir()
    (project / "policies" / "own.py").touch()
    policy_names.check(["mine"])
