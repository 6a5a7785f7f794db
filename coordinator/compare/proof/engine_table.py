"""The proof through the simulated engines, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from coordinator.compare.proof.cells import Share
from coordinator.compare.proof.engine_cells import Result
from coordinator.compare.proof.engine_record import EngineProof, criteria
from coordinator.compare.proof.engine_truth import Truth
from coordinator.compare.verdict import Verdict


def show(proof: EngineProof, console: Console) -> None:
    """Print the tables of the cells that are whole, and whether the criteria hold."""
    found = proof.results()
    console.print(truths(proof.first_results(), proof.experiments))
    if second := proof.second_results():
        console.print(truths(second, second[0].experiments))
    console.print(planted(found))
    for text, held in criteria(proof):
        console.print(f"{'holds' if held else 'FAILS'}: {text}", style="green" if held else "red", markup=False, highlight=False)
    if proof.missing:
        console.print(f"not run yet: {', '.join(proof.missing)}", style="yellow", markup=False, highlight=False)


def truths(found: list[Result], experiments: int) -> Table:
    """Coverage, errors and power of each truth."""
    table = Table(
        "planted", "true ratio (99 %)", "half-width", "coverage (99 %)", *(verdict.value for verdict in Verdict),
        "rig unfit", "false", "power", "faults named",
        title=f"The verdict through simulated engines, {experiments} experiments a cell", title_justify="left",
    )  # fmt: skip
    for each in found:
        if not each.truths or each.alarms is None:
            continue
        table.add_row(
            each.cell.name,
            "\n".join(_true(name, found, alone=len(each.truths) == 1) for name, found in each.truths.items()),
            "-" if each.half_width is None else f"{each.half_width:.1%}",
            "-" if each.covered is None else _counted(each.covered),
            *(_share(each.verdicts[verdict.value]) for verdict in Verdict),
            _share(each.unfit),
            _share(each.wrong),
            "-" if each.right is None else _share(each.right),
            str(each.alarms.count),
        )
    return table


def planted(found: list[Result]) -> Table:
    """Faults: caught or not, and what the verdicts are with and without them."""
    table = Table(
        "planted", "caught and named (99 %)", "verdicts", "without the detectors", "as it is said",
        title="Planted faults, through simulated engines", title_justify="left",
    )  # fmt: skip
    for each in found:
        if each.caught is not None:
            table.add_row(each.cell.name, _counted(each.caught), _said(each.verdicts), _said(each.without), each.example)
    return table


def _true(name: str, found: Truth, *, alone: bool) -> str:
    text = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}, error {found.error:.1%})"
    return text if alone else f"{name}: {text}"


def _said(shares: dict[str, Share]) -> str:
    return ", ".join(f"{name} {_share(share)}" for name, share in shares.items() if share.count)


def _counted(share: Share) -> str:
    low, high = share.interval
    return f"{share.count} of {share.of} ({low:.0%} to {high:.0%})"


def _share(share: Share) -> str:
    return f"{share.value:.0%}"
