"""Jobs that start warm: as clean as cold ones, each for itself, and cold where a fork would not do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from support.projects import EXPERIMENT, PARAMETERS, cell, experiment, notebook
from support.warm_jobs import KERNEL, LOOK, SOIL, WAIT, WORKER, Begun, appears, cold, gone

from kvlab.workbench.jobs import fork_server, launch, warm_start

pytestmark = pytest.mark.roundtrip


@pytest.fixture(scope="module")
def shared():
    """A starter whose server many tests use."""
    if not warm_start.possible():
        pytest.skip("nothing forks here")
    made = warm_start.Starter()
    yield made
    made.close()


@pytest.fixture
def starter():
    """A starter of a test's own, which may break."""
    made = warm_start.Starter()
    yield made
    made.close()


# ---------------------------------------------------------------- clean


def test_a_job_finds_nothing_of_the_one_before(shared, tmp_path):
    first = Begun(shared.start, tmp_path / "first", LOOK, SOIL)
    first = first.look()
    second = Begun(shared.start, tmp_path / "second", LOOK).look()
    assert first["family"]["names"][0] == second["family"]["names"][0] == WORKER
    assert first["family"]["pids"][1:3] == second["family"]["pids"][1:3]  # the same server
    assert first["family"]["pids"][0] != second["family"]["pids"][0]
    for look, name in ((first, "first"), (second, "second")):
        own = look["found"]["environment"]
        assert own.pop("MLFLOW_RUN_ID") == name and own.pop("JPY_PARENT_PID") == str(look["family"]["pids"][0])
        assert look["found"].pop("folder") == str(tmp_path / name)
        assert look["found"]["threads"] == 2 and own["OMP_NUM_THREADS"] == "2"
    assert first["found"] == second["found"]
    for one, other in zip(first["drawn"], second["drawn"], strict=True):
        assert one != other


def test_a_warm_notebook_is_what_a_cold_one_is(shared, tmp_path):
    """Its surroundings, and what it shows: figures, bars, warnings, messages of loggers."""
    show = [
        "import warnings\nplt.plot([1, 2]);\nwarnings.warn('hear')",
        "transformers.logging.get_logger('transformers.x').warning('and see')",
        "for _ in tqdm.auto.tqdm(range(3)):\n    pass",
        "import subprocess\nprint(subprocess.run(['echo', 'from a child'], capture_output=False).returncode)",
    ]
    pair = [Begun(start, tmp_path / name, LOOK, *show) for name, start in (("cold", cold), ("warm", shared.start))]
    looks = [begun.look() for begun in pair]
    assert [look["family"]["names"][0] == WORKER for look in looks] == [False, True]
    for look in looks:
        look["found"].pop("folder")
        del look["found"]["environment"]["JPY_PARENT_PID"], look["found"]["environment"]["MLFLOW_RUN_ID"]
        assert look["cached"] == looks[0]["cached"]
    assert looks[0]["found"] == looks[1]["found"]
    shown = []
    for begun in pair:
        kinds = [sorted(output.get("data", {"text/plain": ""})) for output in begun.outputs()]
        texts = "".join("".join(output.get("text", "")) for output in begun.outputs())
        shown.append((sorted(kind for kind in kinds if kind != ["text/plain"]), "UserWarning: hear" in texts))
        assert "and see" in texts and "from a child" in texts
    assert shown[0] == shown[1] and ["image/png", "text/plain"] in shown[0][0] and shown[0][1]


def test_nothing_of_a_users_folder_is_kept_from_job_to_job(shared, tmp_path):
    """A module beside the notebook, and a policy of the workspace, are what they are when the job begins."""
    (tmp_path / "beside").mkdir()
    see = (
        f"import sys, os, pathlib\nsys.path.insert(0, {str(tmp_path / 'beside')!r})\n"
        "assert 'helper' not in sys.modules\nimport helper\npathlib.Path('look.json').write_text(str(helper.VALUE))"
    )
    for value in (1, 22):
        (tmp_path / "beside" / "helper.py").write_text(f"VALUE = {value}\n")
        assert Begun(shared.start, tmp_path / f"job-{value}", see).look() == value


def test_the_server_has_no_connection_and_no_thread_of_python(shared, tmp_path):
    look = Begun(shared.start, tmp_path / "job", LOOK).look()
    server = psutil.Process(look["family"]["pids"][1])
    assert "kvlab.workbench.jobs.fork_server" in server.cmdline()
    assert server.net_connections() == [] and server.open_files() == []
    assert look["found"]["cuda"] is False


# ---------------------------------------------------------------- each for itself


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("os._exit(9)", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
        ("os.kill(os.getppid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_job_that_dies_takes_only_itself(shared, tmp_path, how, code):
    other = Begun(shared.start, tmp_path / "other", WAIT, LOOK)
    appears(tmp_path / "other" / "here")
    dying = Begun(shared.start, tmp_path / "dying", LOOK, f"import os, signal\n{how}")
    ended, note = dying.end()
    assert ended == code
    assert note is None if code < 0 else note["died"] and "DeadKernelError" in note["error"]
    family = json.loads((tmp_path / "dying" / "look.json").read_text())["family"]
    assert gone(family["pids"][:1])
    (tmp_path / "other" / "go").touch()
    assert other.look()["family"]["pids"][1] == family["pids"][1]


def test_memory_and_threads_are_limited_for_one_job_alone(shared, tmp_path):
    """A limit that a job sets for itself stops it alone; the next one has the limit that the sweep began with."""
    greedy = (
        "import resource, torch\ntorch.set_num_threads(1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\nmuch = b'1' * 2**29"
    )
    code, note = Begun(shared.start, tmp_path / "greedy", greedy).end()
    assert code == 1 and "MemoryError" in note["error"] and not note["died"]
    after = Begun(shared.start, tmp_path / "after", LOOK, "assert torch.get_num_threads() == 2\nb'1' * 2**29;").look()
    import resource

    assert after["found"]["limit"] == list(resource.getrlimit(resource.RLIMIT_AS))


def test_another_environment_has_another_server_and_jobs_under_way_go_on(shared, tmp_path):
    older = Begun(shared.start, tmp_path / "older", WAIT, LOOK)
    newer = Begun(shared.start, tmp_path / "newer", LOOK, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1").look()
    (tmp_path / "older" / "go").touch()
    older = older.look()
    assert older["found"]["threads"] == 2 and newer["found"]["threads"] == 1
    assert older["family"]["pids"][1] != newer["family"]["pids"][1]
    assert gone(older["family"]["pids"][1:2])


def test_a_change_in_the_packages_code_begins_another_server(starter, tmp_path, monkeypatch):
    first = Begun(starter.start, tmp_path / "first", LOOK).look()
    monkeypatch.setattr(warm_start, "_stamp", lambda: "edited")
    second = Begun(starter.start, tmp_path / "second", LOOK).look()
    assert first["family"]["pids"][1] != second["family"]["pids"][1]


def test_any_edited_file_of_the_package_counts(tmp_path, monkeypatch):
    package = tmp_path / "kvlab"
    (package / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/one.py"):
        (package / name).write_text("a = 1\n")
    monkeypatch.setattr(warm_start, "PACKAGE", package)
    before = warm_start._stamp()
    assert warm_start._stamp() == before
    (package / "deep" / "one.py").write_text("a = 2\n")
    assert warm_start._stamp() != before


# ---------------------------------------------------------------- ends


def test_a_job_that_is_stopped_ends_and_one_that_had_not_begun_never_begins(starter, tmp_path):
    stopped, goes_on = (
        Begun(starter.start, tmp_path / name, "import pathlib\npathlib.Path('here').write_text('1')", LOOK)
        for name in ("stopped", "goes on")
    )
    stopped.task.stop()  # the server is still importing
    assert stopped.end()[0] == -signal.SIGTERM
    goes_on.look()
    assert not (tmp_path / "stopped" / "here").exists()
    running = Begun(starter.start, tmp_path / "running", LOOK, "import time\ntime.sleep(600)")
    family = json.loads(appears(tmp_path / "running" / "look.json"))["family"]
    worker = psutil.Process(family["pids"][0])
    kernel = worker.children()
    assert [one.name() for one in kernel] == [KERNEL]
    running.task.stop()
    assert not worker.is_running() and not any(one.is_running() for one in kernel)


def test_a_killed_driver_leaves_no_process_behind(tmp_path):
    script = textwrap.dedent(f"""
        import os, pathlib, sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_warm_start import LOOK, Begun
        from kvlab.workbench.jobs import warm_start
        folder = pathlib.Path({str(tmp_path)!r})
        starter = warm_start.Starter()
        begun = [Begun(starter.start, folder / name, LOOK, "import time; time.sleep(600)")
                 for name in ("one", "two")]
        begun[0].end()
    """)
    driving = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    for name in ("one", "two"):
        appears(tmp_path / name / "look.json")
    family = [one.pid for one in psutil.Process(driving.pid).children(recursive=True)]
    assert len(family) == 5  # the server, two workers, two kernels
    driving.kill()
    driving.wait()
    assert gone(family)


def test_a_server_that_is_still_importing_ends_at_once(starter, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    Begun(starter.start, tmp_path / "job", LOOK)
    server = psutil.Process(starter._server._process.pid)
    begun = time.monotonic()
    starter.close()
    assert not server.is_running() and time.monotonic() - begun < 2
    assert "nobody" in fork_server.load(lambda: False)


def test_a_sweep_leaves_no_server_and_its_jobs_start_warm(project, console):
    name = "import pathlib, psutil\npathlib.Path(f'{reduction}.txt').write_text(psutil.Process().parent().name())"
    notebook(project / "notebooks" / "toy.ipynb", cell(PARAMETERS, "parameters"), cell(name))
    experiment(project, grid={"reduction": [0.5, 0.6]})
    before = psutil.Process().children()  # the server that other tests share may be among them
    found = launch.run(EXPERIMENT, workers=1, console=console)
    assert [result.state for result in found] == ["finished"] * 2, console.file.getvalue()
    assert [path.read_text() for path in sorted((project / "notebooks").glob("*.txt"))] == [WORKER] * 2
    left = [one for one in psutil.Process().children() if one not in before]
    assert not [one for one in left if "kvlab.workbench.jobs.fork_server" in one.cmdline()]


# ---------------------------------------------------------------- cold


def test_jobs_go_on_cold_when_the_server_was_killed(starter, tmp_path, capfd):
    """The one under way has died; one that it was asked for begins cold, and so do those that follow."""
    running = Begun(starter.start, tmp_path / "running", LOOK, "import time\ntime.sleep(600)")
    family = json.loads(appears(tmp_path / "running" / "look.json"))["family"]
    server = psutil.Process(family["pids"][1])
    server.suspend()
    asked = Begun(starter.start, tmp_path / "asked", LOOK)
    server.kill()
    assert running.end()[0] == -signal.SIGKILL
    assert not psutil.pid_exists(family["pids"][0])
    after = Begun(starter.start, tmp_path / "after", LOOK)
    for begun in (asked, after):
        assert WORKER not in begun.look()["family"]["names"]
    told = [line for line in capfd.readouterr().err.splitlines() if "server" in line]
    assert told == ["the server for warm starts died (signal 9); from now on jobs start cold"]


def test_a_library_that_begins_a_thread_when_it_is_imported_makes_jobs_start_cold(starter, tmp_path, capfd):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys, threading, time\nif 'kvlab.workbench.jobs.fork_server' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    looks = [Begun(starter.start, tmp_path / name, LOOK, PYTHONPATH=path).look() for name in ("one", "two")]
    assert not any(WORKER in look["family"]["names"] for look in looks)
    assert "server" not in capfd.readouterr().err


def test_with_a_gpu_nothing_is_forked(monkeypatch):
    monkeypatch.setattr(fork_server, "MODULES", ("torch", "there.is.none"))
    monkeypatch.setattr(fork_server, "_has_gpu", lambda: True)
    monkeypatch.setenv("MPLBACKEND", "agg")
    assert "GPU" in fork_server.load(lambda: True)


def test_a_job_that_cannot_be_forked_begins_cold(monkeypatch):
    """Too many processes, say: the server and its other jobs go on."""
    asked = [{"job": 0, "spec": "a"}, {"job": 1, "spec": "b"}]
    server = object.__new__(fork_server.Server)
    server.owner, server.children, server.waiting, server.retiring = os.getppid(), {}, asked, True
    told = []
    monkeypatch.setattr(fork_server.Server, "_listen", lambda *_: True)
    monkeypatch.setattr(fork_server.Server, "reply", lambda _, **fields: told.append(fields))

    def full():
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(fork_server.os, "fork", full)
    assert server.serve() is None
    assert told == [{"job": 0, "unborn": True}, {"job": 1, "unborn": True}]

    class Alive:
        def alive(self):
            return True

        def look(self, number):
            return warm_start.Known(unborn=True)

    class Cold:
        def code(self):
            return 7

    job = warm_start.Forked(Alive(), 0, Cold)
    assert (job.code(), job.code()) == (None, 7)


def test_what_jobs_share_and_what_is_their_own(monkeypatch):
    """A variable that jobs may have of their own comes from the place where they have none."""
    asked = []

    class Quiet:
        def __init__(self, environment, stamp):
            self.environment, self.stamp = environment, stamp

        def alive(self):
            return True

        def ask(self, spec, folder, own):
            asked.append((self, own))
            return 0

    monkeypatch.setattr(warm_start, "Server", Quiet)
    monkeypatch.setattr(warm_start.sys, "platform", "linux")
    starter, shared = warm_start.Starter(), {"A": "1", "KVLAB_ROOT": "/shared", "MLFLOW_RUN_ID": "outer"}
    for own in ({"MLFLOW_RUN_ID": "one"}, {"MLFLOW_RUN_ID": "two", "KVLAB_ROOT": "/own"}):
        starter.start({"more": True}, None, shared, own)
    (first, one), (second, two) = asked
    assert first is second and first.environment == {"A": "1"}
    assert one == {"KVLAB_ROOT": "/shared", "MLFLOW_RUN_ID": "one"}
    assert two == {"KVLAB_ROOT": "/own", "MLFLOW_RUN_ID": "two"}


@pytest.mark.parametrize("without", ["macOS", "Windows", "switched off", "the last job", "more variables"])
def test_where_no_server_would_do_or_pay_there_is_none(starter, tmp_path, monkeypatch, without):
    own, spec = {"MLFLOW_RUN_ID": "0"}, {"notebook": "none.ipynb", "more": without != "the last job"}
    if without in ("macOS", "Windows"):
        monkeypatch.setattr(warm_start.sys, "platform", {"macOS": "darwin", "Windows": "win32"}[without])
    elif without == "switched off":
        monkeypatch.setenv(warm_start.SWITCH, "0")
    elif without == "more variables":
        own["OMP_NUM_THREADS"] = "5"
    begun = []
    monkeypatch.setattr(warm_start, "Process", lambda *given: begun.append(given) or "cold")
    assert starter.start(spec, tmp_path, {"A": "1"}, own) == "cold"
    assert begun == [(spec, tmp_path, {"A": "1", **own})] and starter._server is None
