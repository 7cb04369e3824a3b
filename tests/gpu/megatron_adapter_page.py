"""Turn results of megatron_adapter.py into a dated page.

python tests/gpu/megatron_adapter_page.py docs/results/PAGE.md RESULTS.json [RESULTS.json ...]

Sections may come from several runs; each says which commit it ran at (`--commit` of the script).
"""

import json
import sys
from pathlib import Path
from typing import Any

SECTIONS = {
    "layer": "Hidden 3072, intermediate 1024, 32 local experts, top-k 8, two layers, 128 tokens, two updates, full "
    "recomputation. W and W^T are compared byte by byte with the reference quantizer on the masters fetched from "
    "pinned memory; masters with those of unattached Megatron (Muon on the GPU; TE's fused Adam) on the "
    "same gradients.",
    "accumulate": "Three microbatches against the sum of three single passes, in a fixed order of summation.",
    "schedule": "Eight steps under a warm-up, a cosine and a growing weight decay, clipping on: the bf16 variant "
    "beside unattached Megatron on the same gradients.",
    "checkpoint": "Megatron's distributed checkpoint, attached to unattached and back.",
}


def merge(paths: list[str]) -> dict[str, Any]:
    """The sections of several runs; a section that ran twice is an error, so that no page picks the better one."""
    merged: dict[str, Any] = {"checks": {}, "runs": []}
    for path in paths:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        for earlier in merged["runs"]:
            both = set(earlier["seconds"]) & set(data["seconds"])
            if both:
                raise SystemExit(f"{path}: sections {sorted(both)} stand in an earlier file too; give each once")
        merged["runs"].append({key: data[key] for key in ("environment", "seconds")})
        merged["checks"] |= data["checks"]
        merged |= {key: data[key] for key in ("memory", "training") if key in data}
    return merged


def checks_section(checks: dict[str, Any], section: str) -> list[str]:
    """One row for each check, with what was found."""
    lines = ["", f"## {section.capitalize()}", "", SECTIONS[section], "", "| check | | found |", "|---|---|---|"]
    for name, row in checks.items():
        if name.split("/")[0] == section:
            detail = "" if row["detail"] is None else str(row["detail"]).replace("|", "/")
            lines.append(
                f"| {name.removeprefix(section + '/')} | {'ok' if row['passed'] else '**failed**'} | {detail} |"
            )
    return lines


def memory_section(memory: dict[str, Any]) -> list[str]:
    """Bytes per expert parameter."""
    lines = [
        "",
        "## Memory",
        "",
        f"GPU bytes per expert parameter ({memory['expert_parameters'] / 1e6:.0f} million of them), all of the trainer "
        "counted. Staged variants keep masters and state in pinned host memory.",
        "",
        "| optimizer | variant | between steps | without gradients | peak of the step | BF16 expert storage |",
        "|---|---|---|---|---|---|",
    ]
    for row in memory["rows"]:
        kinds = ("between", "without_gradients", "peak_of_step")
        numbers = " | ".join(f"{row[f'{kind}_per_expert_parameter']:.2f}" for kind in kinds)
        owned = "" if row["expert_storage"] is None else f"{row['expert_storage']} B"
        lines.append(f"| {row['optimizer']} | {row['variant']} | {numbers} | {owned} |")
    return lines


def training_section(training: dict[str, Any], checks: dict[str, Any], picture: str) -> list[str]:
    """Mean loss of the last 20 steps."""
    variants = list(training["last20"])
    lines = ["", "## Training", "", f"300 steps with {training['optimizer']}. Mean loss of the last 20 steps:", ""]
    lines += ["| seed | " + " | ".join(variants) + " | fp8 beside bf16 |", "|---" * (len(variants) + 2) + "|"]
    for seed in range(len(training["last20"][variants[0]])):
        losses = " | ".join(f"{training['last20'][variant][seed]:.4f}" for variant in variants)
        check = next(row for name, row in checks.items() if name.startswith(f"training/seed {seed}:"))
        lines.append(f"| {seed} | {losses} | {check['detail']}{'' if check['passed'] else ' **failed**'} |")
    return [*lines, "", f"![loss curves and changed bytes]({picture})"]


def main(page: str, paths: list[str]) -> None:
    data = merge(paths)
    failed = [name for name, row in data["checks"].items() if not row["passed"]]
    environment = data["runs"][0]["environment"]
    lines = [f"# Megatron adapter, {environment.get('gpu', 'CPU')}", ""]
    lines += ["Made by `tests/gpu/megatron_adapter_page.py` from runs of `tests/gpu/megatron_adapter.py`.", ""]
    lines += [
        f"{len(data['checks'])} checks, {len(failed)} failed.",
        "",
        "| sections | commit | versions |",
        "|---|---|---|",
    ]
    for run in data["runs"]:
        versions = ", ".join(f"{k} {v}" for k, v in run["environment"].items() if k != "commit")
        sections = ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in run["seconds"].items())
        lines.append(f"| {sections} | {run['environment'].get('commit', 'unknown')} | {versions} |")
    present = {name.split("/")[0] for name in data["checks"]}
    for section in SECTIONS:
        if section in present:
            lines += checks_section(data["checks"], section)
    if "memory" in data:
        lines += memory_section(data["memory"])
    if "training" in data:
        folder = Path(page).with_suffix("").name
        lines += training_section(data["training"], data["checks"], f"{folder}/megatron_adapter.png")
    Path(page).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2:])
