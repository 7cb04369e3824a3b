"""A budget for people: variants side by side, in GiB of one GPU, with the sums that decide."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from weftpub.budget.budget import TYPED, Budget, Change
from weftpub.budget.counts import GIB
from weftpub.budget.memory import PHASES, Row

__all__ = ["comparison", "markdown_rows", "verdicts"]

_TITLES = {"rollout": "rollout (the engine serves)", "train": "train (backward pass)", "publish": "publish"}


def comparison(budgets: Sequence[Budget], title: str) -> Table:
    """One column a budget: every row of every phase, host memory, PCIe and publish."""
    table = Table(title=title, caption="~ estimated, * assumed; source of every row: --json")
    table.add_column("GiB of one GPU", no_wrap=True)
    for budget in budgets:
        table.add_column(_heading(budget), justify="right")
    for phase in PHASES:
        table.add_row(
            f"[bold]{_TITLES[phase]}[/]",
            *(f"[bold]{_gib(b.peak(phase))}[/]{'' if b.peak(phase) <= b.usable else ' !'}" for b in budgets),
        )
        _add_rows(table, [b.phases[phase] for b in budgets])
    table.add_section()
    table.add_row("[bold]host memory, pinned, one rank[/]", *(f"[bold]{_gib(b.host_bytes)}[/]" for b in budgets))
    _add_rows(table, [b.host for b in budgets])
    table.add_row("host memory, all ranks of the run", *(_gib(b.host_bytes * b.request.trainer.world) for b in budgets))
    table.add_section()
    table.add_row("PCIe to the GPU, one step", *(_gib(sum(f.up for f in b.pcie)) for b in budgets))
    table.add_row("PCIe to the host, one step", *(_gib(sum(f.down for f in b.pcie)) for b in budgets))
    table.add_row("publish, into one GPU", *(_gib(sum(r.bytes for r in b.publish)) for b in budgets))
    table.add_row("sequences of full length, a number", *(str(max(0, b.sequences)) for b in budgets))
    return table


def verdicts(budgets: Sequence[Budget], typed: Mapping[Change, str] = TYPED) -> list[str]:
    """One line a budget: it fits, or by how much it does not, why, and what would; `typed` as for `Budget.remedies`."""
    lines: list[str] = []
    for budget in budgets:
        name = _heading(budget)
        if budget.fits:
            tight = max(budget.peak(phase) for phase in PHASES)
            lines.append(f"{name}: fits; {(budget.usable - tight) / GIB:.1f} GiB free at the tightest")
            continue
        remedies = budget.remedies(typed)
        works = "; it fits with " + ", or with ".join(remedies) if remedies else "; more GPUs are needed"
        lines.append(f"{name}: DOES NOT FIT: {'; '.join(budget.problems())}{works}")
    return lines


def markdown_rows(model: str, budget: Budget) -> str:
    """One row of a Markdown table: model, variant, optimizer, the phases' GiB, host GiB of the run, PCIe, publish."""
    numbers = [_gib(budget.peak(phase)) for phase in PHASES]
    world = budget.request.trainer.world
    numbers += [
        f"{budget.host_bytes * world / GIB:.0f}",
        _gib(sum(flow.up + flow.down for flow in budget.pcie)),
        _gib(sum(row.bytes for row in budget.publish)),
        "yes" if budget.fits else "no",
    ]
    return f"| {model} | {budget.request.variant} | {budget.request.rule} | " + " | ".join(numbers) + " |"


def _heading(budget: Budget) -> str:
    request = budget.request
    words = [request.variant, request.rule]
    words += ["CPU offload"] if request.cpu_offload else []
    words += ["shared W"] if request.shared_experts else []
    words += ["W^T rebuilt"] if request.rebuild_wt else []
    return ", ".join(words)


def _add_rows(table: Table, columns: Sequence[Sequence[Row]]) -> None:
    marks = {"exact": "", "estimate": " ~", "assumed": " *"}
    keys = list(dict.fromkeys((row.owner, row.what, row.kind) for rows in columns for row in rows))
    for owner, what, kind in keys:
        cells = (sum(row.bytes for row in rows if (row.owner, row.what) == (owner, what)) for rows in columns)
        table.add_row(f"  {owner}: {what}{marks[kind]}", *(_gib(cell) if cell else "-" for cell in cells))


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}" if count >= GIB / 20 else f"{count / GIB:.2g}"
