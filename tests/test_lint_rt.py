"""Each form that the rule forbids is planted, and found; what the engine does all day is not."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lint_rt", ROOT / "tools" / "lint_rt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lint_rt"] = module
    spec.loader.exec_module(module)
    return module


lint = load()

FORBIDDEN = {
    "stream": "s = torch.cuda.Stream()",
    "generic stream": "s = torch.Stream()",
    "stream context": "with torch.cuda.stream(s): pass",
    "event": "e = torch.cuda.Event()",
    "synchronize": "torch.cuda.synchronize()",
    "current stream": "torch.cuda.current_stream().wait_stream(s)",
    "graph": "with torch.cuda.graph(g): pass",
    "imported stream": "from torch.cuda import Stream",
    "non_blocking": "x.copy_(y, non_blocking=True)",
    "non_blocking by name": "x.copy_(y, non_blocking=flag)",
    "pinned": "x = torch.empty(3, pin_memory=True)",
    "pin_memory": "x = x.pin_memory()",
    "cuda": "x = x.cuda()",
    "cpu": "x = x.cpu()",
    "to device": "x = x.to('cuda:0')",
    "to device object": "x = x.to(device=self.device)",
    "item": "def f(x: Tensor): return x.item()",
    "tolist": "def f(*, x: torch.Tensor): return x[0].tolist()",
    "numpy": "def f(x: 'Tensor'): return x.numpy()",
    "item in an inner function": "def f(x: Tensor):\n    def g(): return x.item()",
    "item in an op": "@rt.op(x=rt.Read)\ndef f(*, x): return x.item()",
    "item of torch": "n = torch.sum(x).item()",
    "launch": "add_kernel[grid](x, y)",
    "launch of a jitted function": "@triton.jit\ndef add(x): pass\nadd[(1,)](x)",
    "launch through a module": "kernel.add_kernel[(n, 1)](x)",
    "poll": "if event.query(): pass",
    "raw": "runtime.raw.host_array('a', (1,), t)",
    "raw of self": "self.runtime.raw.poll(e)",
    "buffer's tensor": "buffer.device_tensor.zero_()",
}

ALLOWED = {
    "host values": "ids = np.arange(3).tolist()",
    "ticket": "n = result['n'][0].item()",
    "host values of a host function": "def f(rows: np.ndarray): return rows.tolist()",
    "dtype": "def f(x: Tensor): return x.to(torch.float32)",
    "blocking copy": "x.copy_(y, non_blocking=False)",
    "generic class": "Kernel[int](3)",
    "table of functions": "handlers[name](x)",
    "excused": "x = x.cpu()  # lint-rt: written to a file, after the engine has ended",
    "another raw": "text = response.raw",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_form_is_found(name: str) -> None:
    found = lint.check_source(FORBIDDEN[name], Path("src/headrace/worker/planted.py"))
    assert found
    assert str(found[0]).startswith("src/headrace/worker/planted.py:")


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_form_is_not(name: str) -> None:
    assert lint.check_source(ALLOWED[name], Path("src/headrace/worker/planted.py")) == []


def test_excuse_needs_a_reason() -> None:
    assert lint.check_source("x = x.cpu()  # lint-rt:", Path("a.py"))


def test_loading_may_move_weights() -> None:
    line = "x = x.to(device)"
    assert lint.check_source(line, Path("src/headrace/weights/load.py")) == []
    assert lint.check_source(line, Path("src/headrace/worker/load.py"))


def test_files_of_the_runtime_and_tests_are_left_out(tmp_path: Path) -> None:
    for folder in ("headrace/rt", "headrace/worker"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("rt/cuda.py", "worker/worker.py", "worker/test_worker.py"):
        (tmp_path / "headrace" / name).write_text("x.cuda()\n", encoding="utf-8")
    found = lint.check_tree(tmp_path / "headrace")
    assert [one.path.name for one in found] == ["worker.py"]


def test_the_engine_keeps_the_rule() -> None:
    assert [str(one) for one in lint.check_tree(ROOT / "src" / "headrace")] == []
