"""Turn the results of foundation.sh into a dated page.

    python tests/gpu/foundation_page.py docs/results/PAGE.md OUT

OUT's raw files are kept in a folder of the page's name, which may be OUT itself: to replace a section, put its files
there, and its line into summary.txt. Lines of a notes.txt there are put into the page.
"""

import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from result_files import keep, made_anew, notes

DEMOS = ("muon", "adamw")
LABELS = {
    "copy": "device copy",
    "weftpub": "weftpub",
    "weftpub_unchecked": "weftpub without check and sums",
    "transformer_engine": "TransformerEngine",
    "torch": "eager torch",
    "torch_compile": "torch.compile",
}


def load(folder: Path, name: str) -> dict[str, Any]:
    """One section's JSON; a section that did not run is an error, so that no page is half true."""
    path = folder / name
    if not path.exists():
        raise SystemExit(f"{path} is missing: run tests/gpu/foundation.sh {folder} first")
    return json.loads(path.read_text())


def at(data: dict[str, Any]) -> str:
    """Which commit a section ran at; sections that do not say it have it in the summary."""
    where = data["environment"]
    return f"At {where['commit']}, {where['date']}."


def bytes_section(verify: dict[str, Any]) -> list[str]:
    """Golden presets and shape classes."""
    presets: dict[str, list[str]] = defaultdict(list)
    for row in verify["golden"]:
        state = "refused" if "refused" in row else "exact" if row["ok"] else "WRONG"
        presets[row["preset"]].append(f"{row['input']} {state}")
    shapes: dict[str, list[bool]] = defaultdict(list)
    for row in verify["shapes"]:
        shapes[row["shape"]].append(row["ok"])
    lines = [
        "## Bytes",
        "",
        f"{at(verify)} Each preset against the bytes of its peer's own code: W, W^T, both scales.",
        "",
    ]
    lines += ["| preset | inputs |", "|---|---|"]
    lines += [f"| {preset} | {', '.join(states)} |" for preset, states in presets.items()]
    lines += ["", "W^T == W.T, scale_t == scale.T and, where a CPU can tell, all bytes equal to the reference:", ""]
    lines += ["| shape class | presets with operators of their own | right |", "|---|---|---|"]
    return lines + [f"| {shape} | {len(oks)} | {sum(oks)} |" for shape, oks in shapes.items()]


def speed_section(quantize: dict[str, Any]) -> list[str]:
    """Quantizer beside what users would take instead."""
    names = [name for name in LABELS if any(name in row["us"] for row in quantize["rows"])]
    lines = ["", "## Quantizer speed", ""]
    lines += [
        f"{at(quantize)} FP32 in; W, W^T, both scales, the non-finite check and the checksum's tile sums out: 6 bytes "
        "per element, as in the device copy beside it. Results are checked before they are timed. Microseconds (TB/s), "
        "medians.",
        "",
        "| experts x M x N | " + " | ".join(LABELS[name] for name in names) + " | share of the copy |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in quantize["rows"]:
        cells = [f"{row['us'][name]:.1f} ({row['tb_s'][name]:.2f})" if name in row["us"] else "" for name in names]
        lines.append(f"| {row['spec']} | {' | '.join(cells)} | {row['of_copy']:.3f} |")
    return lines


def transpose_section(measured: dict[str, Any]) -> list[str]:
    """W^T from W beside torch and the copy."""
    lines = ["", "## W^T from W", ""]
    lines += [
        f"{at(measured)} FP8 in, transposed FP8 out, dequant scales along: 2 bytes per element, as in the device copy "
        "beside it. Bytes are compared with torch's before and after. Microseconds (TB/s), medians, the host's time "
        "included.",
        "",
        "| experts x M x N | device copy | weftpub | torch | share of the copy |",
        "|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        cells = [f"{row['us'][name]:.1f} ({row['tb_s'][name]:.2f})" for name in ("copy", "in use", "torch")]
        lines.append(f"| {row['work']} | {' | '.join(cells)} | {row['of_copy']['in use']:.3f} |")
    return lines


def staging_section(staging: dict[str, Any]) -> list[str]:
    """The staging pipeline beside the duplex copy."""
    ceilings = ", ".join(f"{kind} {value:.1f}" for kind, value in staging["ceilings_gb_s"].items())
    shape = "x".join(map(str, staging["shape"]))
    lines = ["", "## Staging", ""]
    lines += [
        f"A whole optimizer step over {staging['matrices']} matrices of {shape}, masters and state up and down through "
        "the slots. "
        f"Pinned copies of the same run, GB/s: {ceilings}.",
        "",
        "| optimizer | slots | ms per step | GB/s | share of the duplex copy |",
        "|---|---|---|---|---|",
    ]
    for row in staging["steps"]:
        lines.append(
            f"| {row['load']} | {row['slots']} | {row['seconds'] * 1e3:.1f} | {row['gb_s']:.1f} | {row['share']:.3f} |"
        )
    return lines


def demo_section(folder: Path) -> list[str]:
    """The main job on the GPU."""
    lines = ["", "## The main job (`make demo NO_INSTALL=1`)", ""]
    for optimizer in DEMOS:
        report = load(folder / f"demo-{optimizer}", "report.json")
        lines += [
            f"{optimizer}: `{report['result']}`",
            "",
            "| step | loss | changed | publish ms | version |",
            "|---|---|---|---|---|",
        ]
        for step in report["steps"]:
            cells = (step["step"], f"{step['loss']:.4f}", f"{step['changed']:.1%}", f"{step['publish_ms']:.1f}")
            lines.append(f"| {' | '.join(map(str, cells))} | {step['version']} |")
        lines.append("")
    return lines


def keep_all(out: Path, folder: Path) -> None:
    """Put the raw files beside the page: those it is made from, and a sweep of tunings where there is one."""
    names = ["verify", "quantize", "transpose", "staging", *(f"demo-{optimizer}/report" for optimizer in DEMOS)]
    for name in [*names, *(["tune"] if (out / "tune.json").exists() else [])]:
        path = folder / name
        keep(path.parent, path.name, load(out, f"{name}.json"))
    if out.resolve() != folder.resolve():
        shutil.copy(out / "summary.txt", folder / "summary.txt")


def main(page: Path, results: list[str]) -> None:
    """Write the page and keep its raw files."""
    out, folder = Path(results[0]), page.with_suffix("")
    keep_all(out, folder)
    verify, quantize, transpose, staging = (
        load(folder, f"{name}.json") for name in ("verify", "quantize", "transpose", "staging")
    )
    where = quantize["environment"]
    summary = (folder / "summary.txt").read_text().strip().splitlines()
    lines = [
        f"# {where['gpu']}, {where['date']}",
        "",
        f"Driver {where['driver']}, torch {where['torch']}, CUDA {where['cuda']}, triton {where['triton']}. From "
        "`tests/gpu/foundation.sh`; anyone with such a GPU can repeat it. How its sections ended:",
        "",
        *[f"- {line}" for line in summary],
        *notes(folder),
        "",
        *bytes_section(verify),
        *speed_section(quantize),
        *transpose_section(transpose),
        *staging_section(staging),
        *demo_section(folder),
        *made_anew("foundation_page.py", page, None)[1:],
    ]
    page.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
