"""Turn results of publish_speed.py into a dated page.

python tests/gpu/publish_speed_page.py docs/results/PAGE.md OUT/publish_speed.json
"""

import json
import sys
from pathlib import Path
from typing import Any

FLOORS = ("device copy of the bytes", "checksums of all tensors", "commit record on disk, alone")
COLD = ("publish, cold: plan, mappings, first launches", "first open of the mappings")
WARM = "publish, warm"
OTHERS = ("torch._foreach_copy_ of the tensors", "SGLang update_weights_from_tensor")
NOTES = {
    WARM: "the store holds the next generation, mappings are open, the engine's parameters stay where they are",
    "publish, warm, engine's memory moved": "every parameter has new memory each time",
    "publish, mappings opened each time": "`keep=False`: receivers unmap before they answer; for a store that is "
    "offloaded between publishes",
    "publish, packed": "through two buffers of 128 MiB; for memory that cannot be shown where it is",
}
PHASES = ("checksum", "hello", "plan", "pause", "begin", "transfer", "verify", "record", "commit")


def cells(row: dict[str, Any]) -> str:
    """Median, range and number of a row's times."""
    return f"{row['median_ms']:.2f} | {row['min_ms']:.2f} to {row['max_ms']:.2f} | {row['n']}"


def table(rows: list[dict[str, Any]], first: str, note: str) -> list[str]:
    """Rows with their times."""
    lines = ["", f"| {first} | median ms | range | n | {note} |", "|---|---|---|---|---|"]
    return lines + [f"| {row['name']} | {cells(row)} | {described(row)} |" for row in rows]


def described(row: dict[str, Any]) -> str:
    """What else there is to say about a row."""
    if row["name"] in NOTES:
        return NOTES[row["name"]]
    if "tb_s" in row:
        return f"{row['tb_s']:.2f} TB/s"
    return f"{row['mappings']} allocations" if "mappings" in row else ""


def phases(rows: list[dict[str, Any]]) -> list[str]:
    """Medians of each publish's phases."""
    lines = ["", f"| ms, medians | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    for row in rows:
        lines.append(f"| {row['name']} | {' | '.join(f'{row["phases"].get(phase, 0.0):.2f}' for phase in PHASES)} |")
    return lines


def main(page: Path, results: Path) -> None:
    """Write the page."""
    data = json.loads(results.read_text(encoding="utf-8"))
    where, sizes, rows = data["environment"], data["sizes"], {row["name"]: row for row in data["rows"]}
    if data["failures"]:
        raise SystemExit(f"bytes were wrong: {data['failures']}; there is nothing to show")
    floor, warm = rows[FLOORS[0]], rows[WARM]
    limit = 1.5 * floor["median_ms"] + 10
    publishes = [row for row in data["rows"] if "phases" in row]
    others = [row for row in data["rows"] if row["name"].startswith(OTHERS)]
    target = "SGLang FusedMoE parameters" if where["engine"] == "sglang" else "parameters of SGLang's names and shapes"
    lines = [
        f"# Publish speed, {where['gpu']}",
        "",
        f"torch {where['torch']}, CUDA {where['cuda']}, triton {where.get('triton', '-')}, sglang "
        f"{where.get('sglang', '-')}, {where['cpus']} cores, commit {where['commit']}. "
        "From `tests/gpu/publish_speed.py`.",
        "",
        f"{sizes['experts']} experts, {sizes['layers']} layers, {sizes['hidden']} x {sizes['intermediate']}: "
        f"{sizes['experts'] * sizes['layers'] * 6} tensors, {data['bytes'] / 1e9:.2f} GB, from a trainer process's "
        f"`ExpertStore` into another process's {target} on the same GPU. Every publish is of a new generation, with "
        "checksums on; sha256 of every tensor was compared once, checksums of all after every section.",
        "",
        f"**{warm['median_ms']:.2f} ms** from the call of `publish` to 'verified and committed on all ranks' (median "
        f"of {warm['n']}); the limit that was set is 1.5 copies + 10 ms = {limit:.2f} ms. The bytes' own share, one "
        f"copy and one read for the checksums, is {floor['median_ms'] + rows[FLOORS[1]]['median_ms']:.2f} ms.",
        *table([row for row in publishes if row["name"] not in COLD], "publish", "what"),
        *phases(publishes),
        "",
        "Phases follow each other, but for the greeting, which is answered while checksums are looked up. The cold "
        "publish plans, compiles the plan's tables and kernels and opens mappings, once for a plan.",
        *table([rows[name] for name in (*FLOORS, COLD[1]) if name in rows], "floors, in the same run", ""),
        *table(others, "beside it, the same tensors", ""),
    ]
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
