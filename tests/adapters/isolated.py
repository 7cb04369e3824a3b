"""Run the tests of one foreign system in a process of their own, from an ordinary pytest run.

Megatron on a CPU needs `torch.cuda` patched for the whole process, AWEX must never share a process with an engine, and
both take ten seconds to import. So a module says ``pytestmark = pytest.mark.isolated("megatron")``, and its tests are
collected as always, but run in a child that serves them all; every test reports its own result here. Under xdist a
child serves one module, because a worker does not know which modules it will get; otherwise one child serves all
modules of a system. `python tests/adapters/isolated.py RESULTS ARGUMENTS...` is the child.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = "weftpub-isolated-child"
_TEST_DEADLINE_S = 600.0


class IsolatedFailure(Exception):
    """Carries the child's own failure report."""


class Child:
    """One process, started when its first test is due."""

    def __init__(self, config: pytest.Config, system: str) -> None:
        self._config = config
        self._system = system
        self._nodeids: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="weftpub-isolated-")
        self._results = Path(self._directory.name) / "results.jsonl"
        self._output = Path(self._directory.name) / "output.txt"

    def add(self, nodeid: str) -> None:
        self._nodeids.append(nodeid)

    def result(self, nodeid: str) -> dict[str, Any]:
        """Wait for the test's result; IsolatedFailure if the child dies or the deadline passes first."""
        if self._process is None:
            self._start()
        deadline = time.monotonic() + _TEST_DEADLINE_S
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            for result in self._read():
                if result["nodeid"] == nodeid:
                    return result
            if ended:
                break
            time.sleep(0.05)
        self.stop()
        raise IsolatedFailure(
            f"no result for {nodeid} from the {self._system} process within {_TEST_DEADLINE_S:.0f} s; its output:\n"
            f"{self._output.read_text(errors='replace')[-8000:]}"
        )

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(timeout=30)

    def close(self) -> None:
        if self._process is not None:
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.stop()
        self._directory.cleanup()

    def _start(self) -> None:
        root = self._config.rootpath
        switches = [name for name in ("--require-gpu", "--update-golden") if self._config.getoption(name)]
        command = [sys.executable, str(Path(__file__)), str(self._results), "--rootdir", str(root), *switches]
        self._results.touch()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *self._nodeids], cwd=root, stdout=output, stderr=subprocess.STDOUT
            )

    def _read(self) -> Iterator[dict[str, Any]]:
        for line in self._results.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # a line being written comes whole the next time
                yield json.loads(line)


class IsolatedItem(pytest.Item):
    """Stands for a test that runs in a child."""

    child: Child
    original: pytest.Item

    @classmethod
    def wrap(cls, item: pytest.Item, child: Child) -> "IsolatedItem":
        assert item.parent is not None, f"{item.nodeid}: collected from a module"
        wrapped = cls.from_parent(item.parent, name=item.name, nodeid=item.nodeid)
        wrapped.child, wrapped.original = child, item
        wrapped.own_markers = list(item.own_markers)
        wrapped.keywords.update(item.keywords)
        child.add(item.nodeid)
        return wrapped

    def runtest(self) -> None:
        result = self.child.result(self.nodeid)
        if result["outcome"] == "skipped":
            pytest.skip(result["text"])
        if result["outcome"] == "failed":
            raise IsolatedFailure(result["text"])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        if isinstance(excinfo.value, IsolatedFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.original.reportinfo()


class _Reporter:
    """In the child: one line for every finished test."""

    def __init__(self, results: Path) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            sections = "".join(f"\n--- {title} ---\n{content}" for title, content in report.sections)
            line = {"nodeid": report.nodeid, "outcome": report.outcome, "text": text + sections}
            with self._results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main(arguments: list[str]) -> int:
    """The child: run the named tests and write their results."""
    manager_plugin = _Reporter(Path(arguments[0]))
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-W", "ignore"]
    return int(pytest.main([*options, *arguments[1:]], plugins=[manager_plugin, _Marker()]))


class _Marker:
    """Lets the child's conftest know that it is in a child."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(object(), CHILD)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
