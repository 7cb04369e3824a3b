"""Turn results of weftmoe_smoke.py into a dated page.

python tests/gpu/weftmoe_smoke_page.py docs/results/PAGE.md OUT/weftmoe_smoke.json [OUT2/weftmoe_smoke.json ...]

Sections may come from several runs of the script; each row names its commit. The picture of the train section is
expected beside the page, as PAGE/weftmoe_smoke.png.
"""

import json
import sys
from pathlib import Path
from typing import Any

TITLES = {
    "train": "Training",
    "kl": "KL of two steps that differ by one publish",
    "frozen": "Learning rate 0",
    "resume": "Killed or told to end, and resumed",
    "shared": "Experts in memory that trainer and engine both map",
    "two-gpus": "Two GPUs",
}
ABOUT = {
    "train": "Rewards are means of the first and last steps of a run; differences are mean |trainer - rollout| "
    "log-probs of trained tokens, before the update.",
    "kl": "Learning rate 1e-6, the same prompts and random numbers in both steps.",
    "frozen": "Eight completions, scored by the engine after each publish; the results are compared bit by bit.",
    "resume": "Deterministic kernels; sha256 over all published tensors of each step.",
    "shared": "FP8 twice, deterministic kernels: experts copied, and experts in place.",
    "two-gpus": "FP8; the first part of a name is the trainer's layout, the second the engine's.",
}


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def run_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line per run."""
    lines = [
        "| run | commit | steps | reward, first | last | difference, first | last | s a step | rollout | train "
        "| publish | ready after s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        seconds = row["seconds"]
        cells = [
            row["run"],
            row["commit"][:7],
            str(row["steps"]),
            number(row["first_reward"], ".3f"),
            number(row["last_reward"], ".3f"),
            number(row["difference_first"], ".4f"),
            number(row["difference_last"], ".4f"),
            *(number(seconds.get(phase), ".2f") for phase in ("total", "rollout", "train", "publish")),
            number(row["ready_s"], ".0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def check_table(checks: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| check | | found |", "|---|---|---|"]
    for name, check in checks.items():
        found = str(check["detail"]).splitlines()
        lines.append(f"| {name} | {'ok' if check['passed'] else '**FAILED**'} | {found[-1] if found else ''} |")
    return lines


def section(name: str, data: dict[str, Any]) -> list[str]:
    rows = [row for row in data["rows"] if row["section"] == name]
    checks = {key: check for key, check in data["checks"].items() if key.split("/")[0].split(":")[0] == name}
    notes = dict.fromkeys(note for row in rows for note in row["notes"] if "prompts from" not in note)
    return [
        f"## {TITLES[name]}",
        "",
        ABOUT[name],
        "",
        *run_table(rows),
        "",
        *check_table(checks),
        *(["", *(f"- {note}" for note in notes)] if notes else []),
        "",
    ]


def main(page: Path, results: list[Path]) -> None:
    """Write the page; a section that two results hold is taken from the later one."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    latest = {row["section"]: data for data in found for row in data["rows"]}
    sections = [name for name in TITLES if name in latest]
    checks = [check for name in sections for key, check in latest[name]["checks"].items() if key.startswith(name)]
    where = latest[sections[0]]["environment"]
    picture = page.with_suffix("") / "weftmoe_smoke.png"
    lines = [
        f"# weftmoe's smoke, {where.get('gpu', 'CPU')}",
        "",
        "Made by `tests/gpu/weftmoe_smoke_page.py` from runs of `tests/gpu/weftmoe_smoke.py`. "
        + ", ".join(f"{name} {version}" for name, version in where.items() if name != "gpu")
        + ".",
        "",
        f"{len(checks)} checks, {sum(not check['passed'] for check in checks)} failed. Runs were processes side by "
        "side on the same GPU: their seconds say how the machine was shared, not how fast one is.",
        "",
        *(line for name in sections for line in section(name, latest[name])),
    ]
    if picture.is_file():
        lines += [f"![curves of the training runs]({picture.relative_to(page.parent)})"]
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
