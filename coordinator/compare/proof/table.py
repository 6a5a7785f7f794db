"""The proof for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from coordinator.compare.proof.cells import Share
from coordinator.compare.proof.record import Proof, criteria
from coordinator.compare.verdict import Verdict


def show(proof: Proof, console: Console) -> None:
    """Print the tables and whether the criteria hold."""
    for table in (truths(proof), repeats(proof), planted(proof)):
        console.print(table)
    for text, held in criteria(proof):
        console.print(f"{'holds' if held else 'FAILS'}: {text}", style="green" if held else "red", markup=False, highlight=False)


def truths(proof: Proof) -> Table:
    """Coverage, errors and power of each truth."""
    title = f"The verdict on known truths, {proof.experiments:,} experiments a cell"
    table = Table(
        "seeds x requests", "true ratio", "half-width", "coverage (99 %)", *(verdict.value for verdict in Verdict),
        "rig unfit", "false", "power", title=title, title_justify="left",
    )  # fmt: skip
    for cell in (*proof.cells, *proof.again):
        low, high = cell.covered.interval
        table.add_row(
            cell.design + (f", again, {cell.wrong.of:,}" if cell.wrong.of != proof.experiments else ""),
            f"{cell.ratio:.3f}",
            f"{cell.half_width:.1%}",
            f"{cell.covered.value:.1%} ({low:.1%} to {high:.1%})",
            *(_share(cell.verdicts[verdict.value]) for verdict in Verdict),
            _share(cell.unfit),
            _share(cell.wrong),
            "-" if cell.right is None else _share(cell.right),
        )
    return table


def repeats(proof: Proof) -> Table:
    """What judging more than once costs, and that the correction pays for it."""
    table = Table("judged more than once, on the margin", "false, uncorrected", "false, corrected", title_justify="left")
    for repeat in proof.repeats:
        table.add_row(repeat.name, _share(repeat.uncorrected), _share(repeat.corrected))
    return table


def planted(proof: Proof) -> Table:
    """Faults of method: caught or not."""
    table = Table(
        "planted", "caught and named", "false alarms", "verdict without the detector", "as it is said",
        title="Planted faults", title_justify="left",
    )  # fmt: skip
    for one in proof.planted:
        said = ", ".join(f"{name} {_share(share)}" for name, share in one.verdicts.items() if share.count)
        table.add_row(one.name, _share(one.caught), _share(one.false_alarms), said, one.example)
    return table


def _share(share: Share) -> str:
    return f"{share.value:.1%}"
