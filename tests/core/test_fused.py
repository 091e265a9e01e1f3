"""kvlab's Triton kernel computes what PyTorch computes: under Triton's interpreter, since no GPU is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT
from support.refusals import refusal

from kvlab.core import fused, fused_kernels
from kvlab.core.storage import kivi, stored_as
from kvlab.core.store import LayerStore
from kvlab.lib import extras

needs_triton = pytest.mark.skipif(
    not extras.is_installed("triton"),
    reason="triton is not installed: pip install -c constraints.txt -e '.[kernels]'",
)


@pytest.fixture(scope="module")
def interpreted():
    script = ROOT / "tests" / "support" / "interpreted_fused.py"
    paths = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    around = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, script], env=around, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("packed", [False, True], ids=["as_is", "kivi-4"])
@pytest.mark.parametrize("selected", [False, True], ids=["all", "selected"])
def test_the_kernel_computes_what_pytorch_computes(interpreted, dtype, packed, selected):
    cases = [
        case
        for case in interpreted["cases"]
        if (case["dtype"], case["packed"], case["selected"]) == (dtype, packed, selected)
    ]
    assert [case["ran"] for case in cases] == [case["due"] for case in cases]
    ran = [case for case in cases if case["ran"]]
    assert len(ran) >= 3
    for case in ran:
        if dtype == "torch.float32":
            assert case["far"] < 1e-5, case["label"]
        assert case["wrong"] < case["wrong by torch"] + (1e-5 if dtype == "torch.float32" else 1e-3), case["label"]


@needs_triton
def test_the_cases_are_of_all_shapes(interpreted):
    ran = [case for case in interpreted["cases"] if case["ran"]]
    assert {heads // kv_heads for _, heads, kv_heads in (case["heads"] for case in ran)} == {1, 2, 3, 4, 7, 8}
    assert {case["heads"][0] for case in ran} == {1, 2, 3}
    assert {case["head_dim"] for case in ran} == {20, 64, 80, 96, 128}
    assert {(case["packed"], case["ragged"]) for case in ran} == {(a, b) for a in (True, False) for b in (True, False)}
    assert 1 in {case["most"] for case in ran}


@needs_triton
def test_a_live_run_goes_through_the_kernel(interpreted):
    for run in interpreted["runs"]:
        assert run["steps"] == [0, run["due"]] and run["far"] < 1e-4, run


class Launches:
    """Stands for the kernel, and keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *given, **constants: self.calls.append((grid, given, constants))


def launches(monkeypatch, dtype: torch.dtype, packed: bool) -> list:
    kernel = Launches()
    monkeypatch.setattr(fused_kernels, "attend", kernel)
    monkeypatch.setattr(fused, "wanted", lambda device: True)
    store = LayerStore(*torch.randn(2, 2, 4, 300, 128).to(dtype))
    if packed:
        store.set_storage(kivi(4))
    store.attend(torch.randn(2, 16, 1, 128).to(dtype), torch.arange(300).expand(2, 4, 300), 0.1)
    return kernel.calls


def kind(given) -> str | tuple:
    """The type of a kernel's argument, as Triton names it."""
    if isinstance(given, tuple):
        return tuple(map(kind, given))
    if isinstance(given, torch.Tensor):
        letter = {torch.uint8: "u8", torch.bfloat16: "bf16"}.get(given.dtype)
        return "*" + (letter or f"{'fp' if given.is_floating_point() else 'i'}{8 * given.element_size()}")
    return "fp32" if isinstance(given, float) else "i32"


@needs_triton
@pytest.mark.parametrize("packed", [False, True], ids=["as_is", "kivi-4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_compiles_for_an_h100(monkeypatch, tmp_path, dtype, packed):
    """Down to machine code, with what it is called with."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = fused_kernels.attend
    _, given, constants = launches(monkeypatch, dtype, packed)[0]
    names = [name for name in kernel.arg_names if name not in constants]
    types = dict(zip(names, map(kind, given), strict=True)) | dict.fromkeys(constants, "constexpr")
    made = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
    # What a program may have there of a GPU that is smaller than an H100.
    assert made.metadata.shared < 99 * 1024


def test_programs_share_the_entries(monkeypatch):
    ((grid, _, constants),) = launches(monkeypatch, torch.bfloat16, False)
    assert grid == (8, 5) and constants["BLOCK"] == 64
    monkeypatch.setattr(fused, "PROGRAMS", 16)
    assert [grid for grid, *_ in launches(monkeypatch, torch.bfloat16, False)] == [(8, 2)]
    assert [grid for grid, *_ in launches(monkeypatch, torch.bfloat16, True)] == [(8, 2), (8, 2)]


def test_it_runs_where_it_is_asked_to(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv(fused.SWITCH, raising=False)
    assert not fused.wanted(cpu) and not fused.wanted(gpu)
    monkeypatch.setenv(fused.SWITCH, "1")
    monkeypatch.setattr(extras, "is_installed", lambda module: True)
    assert fused.wanted(gpu) and not fused.wanted(cpu)
    monkeypatch.setattr(extras, "is_installed", lambda module: False)
    assert not fused.wanted(cpu)
    assert "Triton is not installed: pip install 'kvlab[kernels]'" in refusal(fused.wanted, gpu)
    monkeypatch.setenv(fused.SWITCH, "yes")
    assert "KVLAB_TRITON is 1" in refusal(fused.wanted, gpu)


def test_pytorch_does_what_the_kernel_does_not(monkeypatch):
    monkeypatch.setattr(fused, "wanted", lambda device: True)
    monkeypatch.setattr(fused, "_computed", lambda *given: "computed")
    slots, queries = torch.arange(30).expand(1, 2, 30), torch.randn(1, 4, 1, 64)

    def store(storage: str = "as_is") -> LayerStore:
        made = LayerStore(*torch.randn(2, 1, 2, 300, 64))
        made.set_storage(stored_as(storage))
        return made

    assert store().attend(queries, slots, 1.0) == store("kivi-4").attend(queries, None, 1.0) == "computed"
    assert store().attend(queries, None, 1.0) is None  # nothing would be copied
    assert {store(name).attend(queries, slots, 1.0) for name in ("int8", "kivi-2", "turbo-4", "kivi-4/int8")} == {None}
    assert store().attend(queries.bfloat16(), slots, 1.0) is None
    assert store().attend(queries.clone().requires_grad_(), slots, 1.0) is None
    with torch.no_grad():
        assert store().attend(queries.clone().requires_grad_(), slots, 1.0) == "computed"
