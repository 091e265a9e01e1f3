"""What `kvlab run --dry-run` says of jobs, and the gpu profile of those that do not fit: nothing is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.commands import call, complaint
from support.paths import ROOT

from kvlab.inputs.models.configs import config_of
from kvlab.lib import devices
from kvlab.workbench import doctor, experiments
from kvlab.workbench.jobs import dry_run, launch

LLAMA, WEIGHTS = "meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a dry run loads, fetches and runs nothing")

    monkeypatch.setattr("kvlab.inputs.models.loading.load", refused)
    monkeypatch.setattr("kvlab.inputs.models.conversion.pull", refused)
    monkeypatch.setattr("kvlab.workbench.jobs.launch.Sweep", refused)
    monkeypatch.setenv("KVLAB_ROOT", str(ROOT))


def rows(out: str) -> list[list[str]]:
    """The cells of the table that the command has printed, row by row, without the headings."""
    lines = out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:] if "tokens  " in line]


def test_an_8b_model_on_a_gpu_that_is_not_here(capsys):
    code, out, err = call(
        capsys, "run", "speed_and_memory", "--profile", "gpu", "--dry-run", "--memory", "80", "-j", "1"
    )
    assert (code, err) == (0, "")
    llama, older = rows(out)
    assert llama[1:5] == ["random:llama-3.1-8b", "96,000 tokens", "16.06 GB", "12.58 GB"] and llama[-1] == "yes"
    # Every query head of Llama 2 has keys and values of its own.
    assert older[1:5] == ["random:llama-2-7b", "96,000 tokens", "13.48 GB", "50.33 GB"] and older[-1] == "yes"
    _, out, _ = call(capsys, "run", "speed_and_memory", "--profile", "gpu", "--dry-run", "--memory", "60", "-j", "1")
    assert [row[-1] for row in rows(out)] == ["NO" if row[1].endswith("2-7b") else "yes" for row in rows(out)]
    assert "random:llama-2-7b in bfloat16 needs" in out and "The GPU has 60.00 GB of memory free." in out


def test_jobs_at_once_each_load_the_model(capsys):
    asked = ["run", "quickstart", "--profile", "gpu", "--dry-run", "--memory", "30", "-j"]
    (alone,), (together,) = (rows(call(capsys, *asked, jobs)[1]) for jobs in ("1", "2"))
    assert alone[-1] == "yes" and together[-1] == "NO"
    said = call(capsys, *asked, "2")[1]
    assert "in 2 jobs at once" in said and "tokens fit with --jobs 1." in said


def test_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 64 * 10**9)
    _, out, _ = call(capsys, "run", "quickstart", "-p", f"model={LLAMA}", "--dry-run", "-j", "1")
    (row,) = rows(out)
    assert row[1] == LLAMA and row[3] == f"{WEIGHTS * 4 / 1e9:.2f} GB", "the CPU has float32"
    assert "The CPU has 64.00 GB of memory free." in out
    _, out, _ = call(capsys, "run", "quickstart", "-p", "model=somebody/unheard-of", "--dry-run")
    (row,) = rows(out)
    assert row[-1] == "not known" and len(row) == 5


@pytest.mark.parametrize("name", experiments.names())
def test_every_gpu_profile_names_its_prompts_and_fits_80_gb(name):
    jobs = launch.planned([name], "gpu")
    for each in dry_run.planned(jobs, None):
        assert each.tokens > 0 and each.need is not None and each.dtype is torch.bfloat16
        assert each.fits(80 * 10**9, 1), each.job.name


def test_the_least_time_is_one_prefill():
    (job,) = launch.planned(["explore"], "gpu")
    (each,) = dry_run.planned([job], None, rate=1e15)
    products = 2 * WEIGHTS * each.tokens + 2 * each.tokens**2 * 32 * 128 * 32
    assert each.least_seconds == pytest.approx(products / 1e15)
    assert dry_run.planned([job], None)[0].least_seconds is None
    assert 1e8 < dry_run.rate_of(torch.device("cpu")) < 1e14


def test_memory_is_of_a_dry_run(capsys):
    assert "give --dry-run with it" in complaint(capsys, "run", "quickstart", "--memory", "80")


def test_a_run_of_the_gpu_profile_says_first_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 8 * 10**9)
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("stop here"))
    with pytest.raises(pytest.fail.Exception, match="stop here"):
        call(capsys, "run", "quickstart", "--profile", "gpu", "-j", "1")
    said = capsys.readouterr().err
    assert f"note: {LLAMA} in float32 needs" in said and "note: Its weights alone do not fit." in said


def test_configurations_by_name(tmp_path):
    assert config_of(LLAMA).num_hidden_layers == 32
    assert config_of("random:tiny-llama-gqa").hidden_size == 64
    config_of("random:tiny-qwen2").save_pretrained(tmp_path / "mine")
    assert config_of(str(tmp_path / "mine")).model_type == "qwen2"
    assert config_of("somebody/unheard-of") is None and config_of("../nowhere") is None


def test_the_doctor_says_which_prompts_fit_a_gpu(monkeypatch):
    module = SimpleNamespace(
        get_device_name=lambda device: "a GPU", get_device_properties=lambda _: SimpleNamespace(total_memory=80 * 10**9)
    )
    monkeypatch.setattr(devices, "resolved", lambda device="auto": GPU)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    found = doctor.gpu().found
    assert "80 GB: llama-3.1-8b in bfloat16 takes prompts of up to" in found
    assert int(found.rpartition("up to ")[2].split("k")[0]) >= 96
    module.get_device_properties = lambda _: SimpleNamespace(total_memory=12 * 10**9)
    assert doctor.gpu().found.endswith("12 GB: llama-3.1-8b in bfloat16 does not fit")
