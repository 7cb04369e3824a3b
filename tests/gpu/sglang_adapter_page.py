"""Turn results of sglang_adapter.py, and of step_phases.py where it ran, into a dated page.

python tests/gpu/sglang_adapter_page.py docs/results/PAGE.md OUT/sglang_adapter.json [OUT/step_phases.json]
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

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


def checks_section(checks: dict[str, Any], section: str) -> list[str]:
    """One row for each check."""
    lines = ["", f"## {section.capitalize()}", "", SECTIONS[section], "", "| check | | found |", "|---|---|---|"]
    for name, row in checks.items():
        if name.replace("/", ":").split(":")[0] == section:
            short = name.removeprefix(section).lstrip("/: ")
            lines.append(f"| {short} | {'ok' if row['passed'] else '**failed**'} | {detail_of(row['detail'])} |")
    return lines


def times(rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of the calls of a step with a small model; the first cycle plans and compiles."""
    lines = ["", "| call | median ms | most | what |", "|---|---|---|---|"]
    for name in rows[-1]["ms"]:
        every = [row["ms"][name] for row in rows[1:]]
        lines.append(f"| {name} | {statistics.median(every):.1f} | {max(every):.1f} | {WHAT.get(name, '')} |")
    return lines


def phases_section(data: dict[str, Any]) -> list[str]:
    """The parts of a step with 4 GB of weights, each beside its floor."""
    size = {name: f"{nbytes / 1e9:.2f} GB" for name, nbytes in data["bytes"].items()}
    lines = [
        "",
        "## A step with 4 GB of experts",
        "",
        f"From `tests/gpu/step_phases.py` at {data['commit']}: the engine's weights are {size.get('weights', '?')}, "
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


def main(page: str, path: str, phases: str | None = None) -> None:
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    checks, environment = data["checks"], data["environment"]
    commit = data.get("commit") or "unknown"
    versions = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "gpu")
    lines = [
        f"# SGLang adapter, {environment.get('gpu', 'CPU')}",
        "",
        f"{versions}, commit {commit}. From `tests/gpu/sglang_adapter.py`.",
        "",
        f"{len(checks)} checks, {sum(not row['passed'] for row in checks.values())} failed. Seconds: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in data["seconds"].items())
        + ".",
    ]
    for section in SECTIONS:
        if any(name.replace("/", ":").split(":")[0] == section for name in checks):
            lines += checks_section(checks, section)
            if section == "cycles":
                lines += times(data["cycles"])
    if phases is not None:
        lines += phases_section(json.loads(Path(phases).read_text(encoding="utf-8")))
    Path(page).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
