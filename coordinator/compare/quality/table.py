"""A quality report for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from coordinator.compare.quality.divergence import Divergence
from coordinator.compare.quality.report import ArmQuality, QualityReport, Score


def show(report: QualityReport, console: Console) -> None:
    """Scores per kind, divergences with the floor beside them, and each arm's verdict."""
    kinds = [score.kind for score in report.arms[0].scores]
    table = Table("arm", *(kind or "all" for kind in kinds), title="Right answers (95 %)", title_justify="left")
    for arm in report.arms:
        table.add_row(arm.name, *(_share(score) for score in arm.scores))
    console.print(table)
    table = Table("against", "text", "tokens", "mean", "above floor", "p99", "top-1", title_justify="left")
    table.title = f"|log-probability - that of {report.baseline}|, nats per token"
    for found in (report.floor, *report.compared):
        name = f"{report.baseline} {found.arm}" if found is report.floor else found.arm
        table.add_row(name, "read", *_divergence(found.read))
        table.add_row("", "decoded", *_divergence(found.decoded))
    console.print(table)
    for found in report.compared:
        for line in _verdict(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{report.questions} questions, set {report.set_version} ({report.set_digest[:12]}), {report.concurrency} in flight, "
        f"{report.wall_s:.0f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _share(score: Score) -> str:
    return "-" if score.share is None else f"{score.right}/{score.asked} ({score.low:.0%}-{score.high:.0%})"


def _divergence(found: Divergence) -> list[str]:
    if found.mean is None or found.p99 is None or found.agreement is None:
        return ["0", "-", "-", "-", "-"]
    above = "-" if found.excess_high is None or found.excess_low is None else f"{found.excess_low:.4f} to {found.excess_high:.4f}"
    return [f"{found.tokens:,}", f"{found.mean:.4f}", above, f"{found.p99:.4f}", f"{found.agreement:.2%}"]


def _verdict(found: ArmQuality) -> list[str]:
    lines = [f"{found.arm}: {found.verdict}", f"  {found.why}"]
    if (pair := found.paired) is not None:
        only = f"right only in the baseline {pair.only_baseline}, only in this arm {pair.only_arm}"
        lines[0] += f"; {only} (McNemar p {pair.mcnemar_p:.2g})"
    return lines
