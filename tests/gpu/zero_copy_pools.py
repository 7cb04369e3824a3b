"""The `pools` section of zero_copy.py: whether the GPU's allocator and torch-memory-saver let an engine load with its
experts apart. A few seconds, without SGLang.

A process of its own makes the calls that a load makes, in their order, with the adapter's own functions: a region of
the saver, experts beside it, the end of their pool, the move into shared memory, the bytes that come free, release and
resume, CUDA graphs. Once for each of the saver's hook modes. The allocator ends a process that it does not like, so
every step is said before it begins: a process that dies is reported with its step.

Two more processes do what must not be done, and have to die at it: else this section would notice nothing.

    python tests/gpu/zero_copy_pools.py SEQUENCE MODE       is such a process; it waits for a line before it begins
"""

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from zero_copy_base import GPU, Report, bits, capture

__all__ = ["pools"]

MIB = 1 << (20 if GPU else 12)
LAYERS = 4
W13, W2, SCALES, REST = 48 * MIB, 24 * MIB, MIB // 16, 20 * MIB  # bytes in each layer
LOADS = "an engine's load"
DISABLED = "a pool that ends inside of the region"
REPLACED = "the saver's pool replaced, and the cache emptied"
# Sequence, hook mode, and the step at which the process has to die; "" if it has to live.
RUNS = (
    (LOADS, "preload", ""),
    (LOADS, "torch", ""),
    (DISABLED, "torch", "leave the saver's disable()"),
    (REPLACED, "torch", "empty the cache"),
)
DEADLINE_S = 60.0


# What the processes do.


class Played:
    """One process: says each step before it begins it.

    Args:
        mode: the saver's hook mode.
        say: tells the experiment.
        empty: uint8 ``[n]`` from PyTorch's allocator.
        device: of it.
    """

    def __init__(
        self,
        mode: str,
        say: Callable[[Mapping[str, Any]], None],
        empty: Callable[[int], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.mode = mode
        self.say = say
        self.empty = empty
        self.device = device
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.rest: dict[str, torch.Tensor] = {}
        self.saver: Any = sys.modules["torch_memory_saver"].torch_memory_saver  # type: ignore[attr-defined]

    def step(self, name: str) -> None:
        """The next step begins."""
        self.say({"step": name})

    def check(self, name: str, passed: bool, detail: Any = None, *, memory: bool = False) -> None:
        """A check of this process."""
        self.say({"check": name, "passed": bool(passed), "detail": detail, "memory": memory})

    def play(self, sequence: str) -> None:
        """All steps of a sequence."""
        self.step("start the saver")
        if GPU:
            self.saver.hook_mode = self.mode
        self.saver._ensure_initialized()
        {LOADS: self.load, DISABLED: self.disable, REPLACED: self.replace}[sequence]()
        self.say({"done": True})

    def load(self) -> None:
        """What an engine with shared experts does, from its load to its second version."""
        self.make()
        memory, given_back = self.move()
        expected = self.bytes_of_experts() - W2  # one was made anew in the saver's pool, which gives nothing back
        self.check(
            "the experts' first memory is given back",
            0.95 * expected <= given_back <= 1.05 * expected,
            f"{given_back} of {expected} bytes",
            memory=True,
        )
        self.hand_over()
        self.release(memory, "first")
        replay = self.graph()
        self.late_free()
        self.release(memory, "second")
        self.step("replay after another release")
        self.check("the graph reads what is there after a release", replay() == self.total())
        self.step("write the next version and replay")
        self.fill(7)
        self.check("the graph reads the next version", replay() == self.total())
        self.step("leave")
        memory.leave()

    def make(self) -> None:
        """The region of a load, and the pool beside it."""
        from weftpub_adapters.sglang.shared_experts_pool import pool_apart

        with ExitStack() as stack:
            self.step("make the pool of the experts")
            apart = stack.enter_context(pool_apart())
            self.step("enter the saver's region")
            with self.saver.region("weights", enable_cpu_backup=False):
                for layer in range(LAYERS):
                    self.step(f"make layer {layer}")
                    self.rest[f"{layer}.attention"] = self.empty(REST)
                    with apart():
                        for name, nbytes in (("w13", W13), ("w13_scale", SCALES), ("w2", W2), ("w2_scale", SCALES)):
                            self.parameters[f"{layer}.{name}"] = torch.nn.Parameter(self.empty(nbytes), False)
                        if layer == 0:
                            self.late = self.empty(W2)
                    self.rest[f"{layer}.norm"] = self.empty(SCALES)
                self.step("load, with temporary tensors in the region")
                self.fill(1)
                loaded = self.empty(W13)
                loaded.copy_(self.parameters["0.w13"].data)
                del loaded
                self.step("free what a second stream used")
                self.stray()
                with apart():
                    self.stray()
                self.step("make a parameter anew in the region")
                again = self.empty(W2)
                again.copy_(self.parameters["3.w2"].data)
                self.parameters["3.w2"].data = again
                del again
                self.step("leave the saver's region")
            self.step("end the pool of the experts")

    def stray(self) -> None:
        """A tensor that is freed while another stream may use it."""
        stray = self.empty(SCALES)
        if GPU:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                stray.fill_(1)
            stray.record_stream(side)
        del stray

    def move(self) -> tuple[Any, int]:
        """Into shared memory: the memory, and the bytes that came free."""
        from weftpub.memory import Catalogue, SharedAllocation
        from weftpub_adapters.sglang.shared_experts_pool import inside_a_region, trimmed

        assert not inside_a_region()
        self.step("make shared memory")
        shared = {name: ((p.numel(),), p.dtype) for name, p in self.parameters.items() if name != "2.w2"}
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            memory = SharedAllocation.join(folder, "pools", self.device, Catalogue.pack(shared, {}))
        self.step("copy the experts there")
        memory.begin(0)
        targets = {name: memory.tensor(name) for name in shared}
        for name, target in targets.items():
            target.copy_(self.parameters[name].data)
        memory.seal()
        self.step("empty the cache before the move")
        before = trimmed(self.cuda)
        self.step("move the parameters")
        for name, target in targets.items():
            self.parameters[name].data = target
        self.step("empty the cache after the move")
        return memory, trimmed(self.cuda) - before

    def hand_over(self) -> None:
        """The expert that is not shared goes to the saver."""
        from weftpub_adapters.sglang.shared_experts_pool import trimmed

        self.step("move what is not shared into the saver's pool")
        with self.saver.region("weights", enable_cpu_backup=False):
            own = self.empty(W2)
            own.copy_(self.parameters["2.w2"].data)
            self.parameters["2.w2"].data = own
            del own
        trimmed(self.cuda)

    def release(self, memory: Any, which: str) -> None:
        """Release and resume the weights' memory."""
        from weftpub_adapters.sglang.shared_experts_pool import trimmed

        before, held = trimmed(self.cuda), self.sum_of_shared(memory)
        self.step(f"{which} release of the weights")
        self.saver.pause("weights")
        freed = trimmed(self.cuda) - before
        least = LAYERS * REST + W2
        self.check(
            f"the {which} release frees the rest", freed >= least, f"{freed} bytes, at least {least}", memory=True
        )
        self.check(f"the {which} release leaves the shared experts", self.sum_of_shared(memory) == held)
        self.step(f"{which} resume of the weights")
        self.saver.resume("weights")
        self.fill(2)

    def graph(self) -> Callable[[], int]:
        """A CUDA graph over experts and the rest; what replays it and says the sum."""
        self.step("capture a CUDA graph")
        out = torch.zeros((), dtype=torch.int64, device=self.device)

        def compute() -> None:
            out.zero_()
            for tensor in self.tensors():
                out.add_(bits(tensor).sum(dtype=torch.int64))

        run = capture(compute)

        def replay() -> int:
            run()
            return int(out)

        self.step("replay it")
        self.check("the graph reads experts and the rest", replay() == self.total())
        return replay

    def late_free(self) -> None:
        """A tensor of the experts' pool that somebody held until now."""
        from weftpub_adapters.sglang.shared_experts_pool import trimmed

        before = trimmed(self.cuda)
        self.step("free the last tensor of the pool that ended")
        del self.late
        self.step("empty the cache")
        freed = trimmed(self.cuda) - before
        self.check("a late free is given back, too", freed >= 0.95 * W2, f"{freed} of {W2} bytes", memory=True)

    def disable(self) -> None:
        """The saver's own way out of a region."""
        with self.saver.region("weights", enable_cpu_backup=False):
            with self.saver.disable():
                held = self.empty(SCALES)
                self.step("leave the saver's disable()")
            self.step("after it")
            del held

    def replace(self) -> None:
        """Another pool for the saver, so that the first one may be given back."""
        with self.saver.region("weights", enable_cpu_backup=False):
            held = self.empty(W2)
            more = self.empty(W2)
        del more
        impl = self.saver._impl
        self.step("empty the cache")
        impl._primary_mem_pool = torch.cuda.MemPool(impl._hook_util.get_allocator())
        torch.cuda.empty_cache()
        self.step("after it")
        del held

    # Bytes.

    @property
    def cuda(self) -> torch.device:
        """Where memory is given back: played rules are about a GPU, too."""
        return torch.device("cuda", 0)

    def bytes_of_experts(self) -> int:
        """Of the parameters that were made apart and are shared now."""
        return sum(p.numel() for name, p in self.parameters.items() if name != "2.w2")

    def tensors(self) -> list[torch.Tensor]:
        """Every weight."""
        return [*(p.data for p in self.parameters.values()), *self.rest.values()]

    def fill(self, seed: int) -> None:
        """Write every weight."""
        for index, tensor in enumerate(self.tensors()):
            tensor.fill_((seed + index) % 251)

    def total(self) -> int:
        """The sum of all weights."""
        return sum(int(tensor[0]) * tensor.numel() for tensor in self.tensors())

    def sum_of_shared(self, memory: Any) -> int:
        """Of what lies in shared memory, by address."""
        return sum(int(p.data.sum()) for p in self.parameters.values() if memory.offset_of(p.data) is not None)


def child(sequence: str, mode: str) -> None:
    """A process of the section; ends with status 0 at once, as the saver's pool must not end outside of a region."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    for module in ("weftpub.memory", "weftpub_adapters.sglang.shared_experts_pool"):
        importlib.import_module(module)

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    say({"step": "ready"})
    if GPU and mode == "preload" and not loaded("torch_memory_saver_hook_mode_preload"):
        say({"skip": "the dynamic linker did not preload the saver's library: are libcuda and libcudart in its paths?"})
        os._exit(0)
    sys.stdin.readline()
    if GPU:
        importlib.import_module("torch_memory_saver")
        device = torch.device("cuda", 0)
        torch.zeros(1, device=device)
        context: Any = nullcontext()

        def empty(nbytes: int) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "adapters"))
        from pool_rules import ABORTS, Rules

        def end(reason: str) -> None:
            print(reason, file=sys.stderr, flush=True)
            if reason == ABORTS:
                os.abort()
            os._exit(1)

        device, rules = torch.device("cpu"), Rules(mode, end)  # type: ignore[arg-type]
        context, empty = rules.installed(), rules.empty
    with context:
        Played(mode, say, empty, device).play(sequence)
        sys.stdout.flush()
        os._exit(0)


# The section.


def loaded(library: str) -> list[str]:
    """Files of this process' shared libraries with this in their names."""
    rows = Path("/proc/self/maps").read_text().splitlines()
    return sorted({row.split(maxsplit=5)[5] for row in rows if library in row})


class Child:
    """One process, as the experiment sees it."""

    def __init__(self, sequence: str, mode: str, log: Path) -> None:
        self.log = log
        self.skipped = ""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if mode == "preload" and GPU:
            from torch_memory_saver import configure_subprocess

            with configure_subprocess():
                environment["LD_PRELOAD"] = os.environ["LD_PRELOAD"]
            folders = [str(Path(path).parent) for path in loaded("libcudart.so")]  # torch's own, which it needs
            environment["LD_LIBRARY_PATH"] = os.pathsep.join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), sequence, mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def run(self, checked: Callable[[Mapping[str, Any]], None]) -> tuple[str, bool]:
        """Let it begin; the step that it came to, and whether it was through."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        step, done = "start", False
        late = threading.Timer(DEADLINE_S, self.process.kill)
        late.start()
        with suppress(BrokenPipeError):  # it has ended: its output says where
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if not line.startswith('{"'):
                continue
            said = json.loads(line)
            step, done = said.get("step", step), said.get("done", done)
            self.skipped = said.get("skip", self.skipped)
            if "check" in said:
                checked(said)
        self.process.wait()
        late.cancel()
        return step, done and self.process.returncode == 0

    def last_words(self) -> str:
        """The end of what it wrote to its error output."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "what():" in line or "memory_saver" in line or "Error" in line]
        return " | ".join((telling or lines)[-2:])[:400]


def pools(report: Report, folder: Path) -> None:
    """All processes, one after the other; they start at once.

    Args:
        folder: for what they write to their error outputs.
    """
    children = [Child(sequence, mode, folder / f"pools-{n}.log") for n, (sequence, mode, _) in enumerate(RUNS)]
    try:
        for one, (sequence, mode, dies_at) in zip(children, RUNS, strict=True):
            began, name = time.monotonic(), f"pools, {mode}: {sequence}"

            def checked(said: Mapping[str, Any], name: str = name) -> None:
                report.check(f"{name}: {said['check']}", said["passed"], said["detail"], memory=said["memory"])

            step, done = one.run(checked)
            end = {"step": step, "status": one.process.returncode, "s": round(time.monotonic() - began, 1)}
            if one.skipped:
                report.number(name, f"not tried: {one.skipped}")
                continue
            if not done:
                end["said"] = one.last_words()
            if dies_at:
                report.check(f"{name}: ends the process, as it must", not done and step == dies_at, end)
            else:
                report.check(f"{name}: every step passes", done, end)
    finally:
        for one in children:
            one.process.kill()
            one.process.wait(30)


if __name__ == "__main__":
    child(*sys.argv[1:])
