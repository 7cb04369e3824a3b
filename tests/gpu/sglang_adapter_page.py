"""Turn results of sglang_adapter.py, and of step_phases.py where it ran, into a dated page.

    python tests/gpu/sglang_adapter_page.py docs/results/PAGE.md OUT/sglang_adapter.json [MORE.json ...]
        [OUT/step_phases.json] [OTHER.json:again ...]

Sections may come from several runs; each names its commit. One that two files hold is taken from the later file, and
the page says how many checks of the earlier one failed. Of a file marked "again" only the times of its cycles are
shown, beside those of the section, with how many of its checks failed. The JSON files go into a folder of the page's
name; lines of a notes.txt there are put into the page.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_files import keep, made_anew, notes, plain

SECTIONS = {
    "cycles": "Drain, release of kv_cache and weights, a step of the Megatron trainer (TransformerEngine, FP8 "
    "experts), resume of weights, publish, resume of kv_cache, continue, greedy answers. CUDA graphs are on.",
    "inflight": "16 requests are being answered when a colocated step begins.",
    "faults": "A publisher in a process of its own goes wrong; then a complete version from another one.",
    "worker": "The engine's worker is killed in the middle of a transfer; another engine takes its place.",
    "eager": "The same cycles without CUDA graphs, in an engine of its own.",
}
WHAT = {
    "drain": "no request is being answered any more, the cache is flushed",
    "release": "kv_cache and weights away, free bytes measured",
    "resume_weights": "memory of the weights back",
    "publish": "the whole publish; here sha256 of every tensor is compared, which takes most of it",
    "weight_version": "the engine's answers say the version",
    "resume": "memory of kv_cache back",
    "continue": "every worker says that it may go on, and does",
}


def detail_of(value: Any) -> str:
    """What was found, on one line of a table."""
    if value is None:
        return ""
    if isinstance(value, dict) and "said" in value:  # a fault
        said = value["said"].get("error", "killed")
        after = value.get("next") or {}
        rest = f"; next publish {after['seconds']} s, {after['state']}" if after else ""
        state = f"; engine {value['state']}" if value.get("state") else ""
        value = f"{value['seconds']} s: {said}{state}{rest}"
    if isinstance(value, dict):
        value = ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value).replace("|", "/").replace("\n", " ")


AGAIN = "again"  # said of a run that only tells how long the same calls took another time


@dataclass(frozen=True)
class Found:
    """One run of a script."""

    data: dict[str, Any]
    again: bool = False

    @property
    def commit(self) -> str:
        return (self.data.get("commit") or "unknown")[:7]

    @property
    def is_step(self) -> bool:
        """Whether it is of step_phases.py, which has rows and no checks."""
        return "checks" not in self.data

    @property
    def sections(self) -> list[str]:
        """Those it ran, in the page's order."""
        return [] if self.is_step or self.again else [name for name in SECTIONS if self.checks(name)]

    @property
    def name(self) -> str:
        """Of its raw file."""
        if self.again:
            return f"again-{self.commit}"
        return "step_phases" if self.is_step else "-".join(self.sections)

    def checks(self, section: str) -> dict[str, dict[str, Any]]:
        """The checks of a section, and of the cycle that brings its engine a first version (faults-first)."""
        mine = (section, f"{section}-first")
        return {name: row for name, row in self.data["checks"].items() if re.split("[/:]", name)[0] in mine}


def verdict(checks: Collection[dict[str, Any]]) -> str:
    return f"{len(checks)} checks, {sum(not check['passed'] for check in checks)} failed"


def environments(runs: list[Found]) -> list[str]:
    """Where each run took place; `start` is the engine's."""
    lines = ["", "| seconds | commit | versions |", "|---|---|---|"]
    for run in runs:
        seconds = ", ".join(f"{name} {spent:.0f}" for name, spent in run.data.get("seconds", {}).items())
        versions = ", ".join(f"{name} {value}" for name, value in run.data["environment"].items() if name != "gpu")
        lines.append(f"| {seconds or 'parts of a step'} | {run.commit} | {versions} |")
    return lines


def checks_section(run: Found, section: str, earlier: list[str]) -> list[str]:
    """One row for each check."""
    lines = ["", f"## {section.capitalize()}", "", f"At {run.commit}. {SECTIONS[section]}", *earlier, ""]
    lines += ["| check | | found |", "|---|---|---|"]
    for name, row in run.checks(section).items():
        short = name.removeprefix(section).lstrip("/: -")
        lines.append(f"| {short} | {'ok' if row['passed'] else '**failed**'} | {detail_of(row['detail'])} |")
    return lines


def times(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of the calls of a step with a small model; the first cycle plans and compiles."""
    lines = ["", "| call | median ms | most | what |", "|---|---|---|---|"]
    for name in rows[-1]["ms"]:
        every = [row["ms"][name] for row in rows[1:]]
        lines.append(f"| {name} | {statistics.median(every):.1f} | {max(every):.1f} | {WHAT.get(name, '')} |")
    return lines


def other_times(runs: list[tuple[str, Found]], folder: str) -> list[str]:
    """The same calls in other runs, a line a run; medians over all cycles but the first."""
    calls = list(runs[0][1].data["cycles"][-1]["ms"])
    lines = ["", "The same calls in other runs, median ms (and the most):", ""]
    lines += [f"| commit | cycles | {' | '.join(calls)} | all its checks | raw |", "|---" * (len(calls) + 4) + "|"]
    for name, run in runs:
        rows = run.data["cycles"][1:]
        every = [[row["ms"].get(call, math.nan) for row in rows] for call in calls]
        cells = [f"{statistics.median(found):.1f} ({max(found):.1f})" for found in every]
        judged = verdict(run.data["checks"].values())
        raw = f"[{name}.json]({folder}/{name}.json)"
        lines.append(f"| {run.commit} | {len(rows) + 1} | {' | '.join(cells)} | {judged} | {raw} |")
    return lines


def phases_section(data: dict[str, Any]) -> list[str]:
    """The parts of a step with 4 GB of weights, each beside its floor."""
    size = {name: f"{nbytes / 1e9:.2f} GB" for name, nbytes in data["bytes"].items()}
    lines = [
        "",
        "## A step with 4 GB of experts",
        "",
        f"From `tests/gpu/step_phases.py`, at {data['commit']}: the engine's weights are {size.get('weights', '?')}, "
        f"its KV cache {size.get('kv_cache', '?')}, the store's W and scales {size['store']}. The store is offloaded "
        "in every step, so each publish opens its mappings anew. A floor is the driver's own calls for as many pieces "
        "of these sizes, a pinned copy of the bytes over the link, or one question to the worker and its answer.",
        "",
        "| part | median ms | range | floor ms | x floor |",
        "|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        floor = f"{row['floor_ms']:.2f} | {row['of_floor']:.2f}" if "floor_ms" in row else "| "
        lines.append(
            f"| {row['name']} | {row['median_ms']:.2f} | {row['min_ms']:.2f} to {row['max_ms']:.2f} | {floor} |"
        )
    return lines


def main(page: Path, results: list[str]) -> None:
    """Write the page; a section that two results hold is taken from the later one."""
    found = [
        Found(plain(json.loads(Path(path).read_text(encoding="utf-8"))), mark == AGAIN)
        for path, _, mark in (result.partition(":") for result in results)
    ]
    folder = page.with_suffix("")
    later = [{one.name for one in found[n + 1 :]} for n in range(len(found))]
    names = [f"{one.name}-{one.commit}" if one.name in later[n] else one.name for n, one in enumerate(found)]
    for name, one in zip(names, found, strict=True):
        keep(folder, name, one.data)
    runs = {name: [n for n, one in enumerate(found) if name in one.sections] for name in SECTIONS}
    runs = {name: places for name, places in runs.items() if places}
    taken = [found[places[-1]].checks(name) for name, places in runs.items()]
    where = found[0].data["environment"]
    lines = [
        f"# SGLang adapter, {where.get('gpu', 'CPU')}",
        "",
        "Made by `tests/gpu/sglang_adapter_page.py` from runs of `tests/gpu/sglang_adapter.py`.",
        "",
        f"{verdict([row for checks in taken for row in checks.values()])}.",
        *notes(folder),
        *environments(found),
    ]
    for section, (*before, last) in runs.items():
        earlier = [
            f"- An earlier run, at {found[n].commit} ({verdict(found[n].checks(section).values())}), is in "
            f"[{names[n]}.json]({folder.name}/{names[n]}.json)."
            for n in before
        ]
        lines += checks_section(found[last], section, ["", *earlier] if earlier else [])
        if section == "cycles":
            lines += times(found[last].data["cycles"])
            others = [(name, one) for name, one in zip(names, found, strict=True) if one.again]
            lines += other_times(others, folder.name) if others else []
    for one in found:
        if one.is_step:
            lines += phases_section(one.data)
    marked = [f"{name}:{AGAIN}" if one.again else name for name, one in zip(names, found, strict=True)]
    lines += made_anew("sglang_adapter_page.py", page, marked)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
