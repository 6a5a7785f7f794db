"""A comparison for people: the two arms side by side, where the time went, and the verdict."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from coordinator.compare.auto_table import NoAutoError, has_auto
from coordinator.compare.auto_table import table as auto_table
from coordinator.compare.paired import Paired
from coordinator.compare.record import Record
from coordinator.compare.slo import in_words
from coordinator.compare.summary import STAGES, ArmSummary, Spread
from coordinator.compare.verdict import Verdict

STYLES = {Verdict.SPLIT: "green", Verdict.COLOCATE: "green", Verdict.EQUIVALENT: "green", Verdict.UNDECIDED: "yellow"}


def show(record: Record, console: Console) -> None:
    """Print tables and the verdict."""
    console.print(latency_table("Unloaded, one request at a time", record.unloaded))
    rates = ", ".join(f"{rate:.2f}" for rate in record.rates_per_s)
    console.print(latency_table(f"Under load, {rates} requests/s", record.loaded))
    console.print(stage_table(record.loaded))
    multiples = record.slo_multiples
    tightness = f"TTFT {multiples['ttft']:.3g} and TPOT {multiples['tpot']:.3g} times the unloaded colocated median"
    console.print(f"SLO: {in_words(record.slo)}; {tightness}", highlight=False, soft_wrap=True)
    if record.paired is not None:
        console.print(paired_line(record.paired), markup=False, highlight=False, soft_wrap=True)
    for line in record.priors:
        console.print(f"usually: {line}", markup=False, highlight=False, soft_wrap=True)
    for note in record.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if has_auto(record):
        console.print(auto_lines(record), markup=False, highlight=False, soft_wrap=True)
    style = STYLES[record.judgement.verdict]
    console.print(record.judgement.sentence(), style=style, markup=False, highlight=False, soft_wrap=True)


def auto_lines(record: Record) -> str:
    """Path `auto` beside both fixed paths, or why there is no such table."""
    try:
        return auto_table(record)
    except NoAutoError as error:
        return f"path auto: {error}"


def paired_line(found: Paired) -> str:
    """For how many requests splitting lost, one line."""
    return (
        f"request by request, splitting lost for {found.lost} of {found.requests}: "
        f"E2E {found.median_s * 1e3:+.1f} ms in the median, {found.p90_s * 1e3:+.1f} ms at p90"
    )


def latency_table(title: str, arms: list[ArmSummary]) -> Table:
    table = Table("", *(arm.path for arm in arms), title=title, title_justify="left")
    for name, pick in _LATENCIES:
        table.add_row(name, *(pick(arm) for arm in arms))
    return table


def stage_table(arms: list[ArmSummary]) -> Table:
    """The ledger of both arms: mean milliseconds of each exclusive stage, their residual and their sum."""
    table = Table("stage, mean ms", *(arm.path for arm in arms), title="Where the time went", title_justify="left")
    for stage in STAGES:
        name = stage.removesuffix("_s").replace("_", " ")
        cells = [f"{arm.ledger_s[stage] * 1e3:.1f}" if arm.ledger_s else "-" for arm in arms]
        table.add_row(name, *cells, end_section=stage == "residual_s")
    shares = ["-" if arm.residual_share is None else f"{arm.residual_share:.1%}" for arm in arms]
    table.add_row("largest residual", *shares)
    table.add_row("KV moved", *(f"{arm.transfer_bytes / 2**20:.1f} MiB" if arm.transfer_bytes else "-" for arm in arms))
    table.add_row("recomputed", *(str(arm.recomputed) for arm in arms))
    return table


def _ms(pick: Callable[[ArmSummary], Spread | None]) -> Callable[[ArmSummary], str]:
    def cell(arm: ArmSummary) -> str:
        value = pick(arm)
        return "-" if value is None else f"{value.p50 * 1e3:.1f} / {value.p90 * 1e3:.1f}"

    return cell


def _one(pick: Callable[[ArmSummary], float | None]) -> Callable[[ArmSummary], str]:
    def cell(arm: ArmSummary) -> str:
        value = pick(arm)
        return "-" if value is None else f"{value * 1e3:.1f}"

    return cell


_LATENCIES: tuple[tuple[str, Callable[[ArmSummary], str]], ...] = (
    ("TTFT ms, p50 / p90", _ms(lambda arm: arm.ttft)),
    ("TPOT ms, p50 / p90", _ms(lambda arm: arm.tpot)),
    ("gap to 2nd token ms, p50 / p90", _ms(lambda arm: arm.second_token_gap)),
    ("ITL ms, p99", _one(lambda arm: arm.itl_p99_s)),
    ("ITL ms, largest", _one(lambda arm: arm.itl_largest_s)),
    ("E2E ms, p50 / p90", _ms(lambda arm: arm.e2e)),
    ("attainment", lambda arm: "-" if arm.attainment is None else f"{arm.attainment:.0%}"),
    ("offered / failed", lambda arm: f"{arm.offered} / {arm.failed}"),
)
