"""The report for people. Its first line is the diagnosis.

Colours appear on terminals only, and never where NO_COLOR is set. Nothing is laid out wider than
the console, so that 80 columns are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table

from padtrace.contracts.catalogue import CONTRACTS
from padtrace.contracts.engine import DIVERGENT
from padtrace.contracts.known import KnownReports
from padtrace.contracts.model import Finding, Group, Quantity, Report
from padtrace.recording.model import Recording
from padtrace.report import advice, blindness
from padtrace.report.summary import case_of
from padtrace.report.verdicts import STYLES, Judgement, told
from padtrace.report.words import plain, plural, ranks_text

_MAX_GROUPS = 12


def print_report(
    out: Console,
    recording: Recording,
    report: Report,
    known: KnownReports,
    judgement: Judgement,
    *,
    path: str | None = None,
    headline: bool = True,
) -> None:
    """The whole report of a check: diagnosis, evidence, coverage, verdict.

    Args:
        judgement: the verdict of the command, of which this report may be one part.
    """
    if headline:
        print_headline(out, judgement)
    for position, group in enumerate(report.groups[:_MAX_GROUPS]):
        # The headline is the first finding already, where one decides.
        if position or judgement.verdict != DIVERGENT or report is not judgement.report:
            out.print(plain(told(group.first), style=STYLES[group.first.severity]))
        out.print(Padding(_evidence(recording, group, known), (0, 0, 1, 2)))
    _more(out, report)
    _tolerated(out, report)
    for note in report.notes:
        out.print(Padding(plain(note), (0, 0, 1, 0)))
    print_coverage(out, recording, report)
    out.print(plain(judgement.last, style=judgement.style))
    for line in advice.next_steps(recording, report, path):
        out.print(plain(line, style="dim"))


def print_headline(out: Console, judgement: Judgement) -> None:
    """The diagnosis and an empty line."""
    out.print(plain(judgement.headline, style=judgement.style))
    out.print()


def print_coverage(out: Console, recording: Recording, report: Report) -> None:
    """What was evaluated how often, and what was not and why."""
    done = [f"{name} {count:,}" for name, count in report.evaluated.items() if count]
    table = _grid()
    if done:
        table.add_row("evaluated", ", ".join(done))
    for line in _forwards(report):
        table.add_row("forwards", line)
    for reason, names in _unevaluated(report).items():
        table.add_row("not", f"{', '.join(names)}: {reason}")
    for line in blindness.blind_spots(recording):
        table.add_row("not seen", line)
    if table.row_count:
        out.print(plain("coverage", style="bold"))
        out.print(Padding(table, (0, 0, 1, 2)))


def _forwards(report: Report) -> list[str]:
    """How many forwards were judged, and of the others why not."""
    counted = report.forwards
    if not counted.total and not counted.nothing_to_judge:
        return []
    lines = [f"{counted.judged:,} of {counted.total:,} judged"]
    lines += [f"{n:,} not judged: {reason}" for reason, n in counted.not_judged.items()]
    nothing = counted.nothing_to_judge
    return lines + [f"{n:,} beside them: {reason}" for reason, n in nothing.items()]


def _unevaluated(report: Report) -> dict[str, list[str]]:
    """Reasons with the contracts they kept from being evaluated: asked for, or never at all."""
    found: dict[str, list[str]] = {}
    for name, reasons in report.skipped.items():
        if name in report.asked or not report.evaluated[name]:
            for reason, count in reasons.items():
                times = f" ({count:,})" if name in report.asked else ""
                found.setdefault(reason, []).append(f"{name}{times}")
    return found


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _evidence(recording: Recording, group: Group, known: KnownReports) -> RenderableType:
    finding = group.first
    table = _grid()
    table.add_row("contract", f"{finding.contract} {CONTRACTS[finding.contract].rule}")
    table.add_row("severity", plain(_severity(finding), style=STYLES[finding.severity]))
    table.add_row("first seen", _where(recording, finding))
    if group.count > 1:
        table.add_row("seen", _spread(group))
    for quantity in (finding.left, finding.right):
        _quantity(table, quantity)
    parting = parted_at(finding)
    if parting:
        table.add_row("parted", parting)
    for position, line in enumerate(finding.avoid):
        table.add_row("" if position else "avoid", line)
    for report_id in finding.known_reports:
        entry = known.get(report_id)
        if entry is not None:
            table.add_row(report_id, _conclusion(entry.title, entry.conclusion, entry.fixed_in))
    return table


def _severity(finding: Finding) -> str:
    return (
        f"{finding.severity.value}: {finding.outcome}"
        if finding.outcome
        else (finding.severity.value)
    )


def _conclusion(title: str, conclusion: str, fixed_in: str | None) -> str:
    fixed = f" Fixed in {fixed_in}." if fixed_in else ""
    return f"{title}. {conclusion}{fixed}".replace("..", ".")


def _where(recording: Recording, finding: Finding) -> str:
    places: list[tuple[str, object]] = [
        ("rank", finding.rank),
        ("step", finding.step),
        ("forward", finding.forward),
        ("draft step", finding.draft_step if finding.worker == "draft" else None),
        (finding.event, finding.enter_seq),
    ]
    words = [f"{name} {value}" for name, value in places if value is not None]
    case = case_of(recording, finding.process, finding.batch)
    return ", ".join(words) + (f" (case {case})" if case else "")


def _spread(group: Group) -> str:
    first, last = group.first_step, group.last_step
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{group.count:,} times on {ranks_text(group.ranks)}, {steps}"


def _quantity(table: Table, quantity: Quantity) -> None:
    needs = f", needs {quantity.expected}" if quantity.expected is not None else ""
    table.add_row(quantity.name, f"{quantity.shown}{needs}")
    if quantity.chain:
        table.add_row("", plain(" -> ".join(_links(quantity.chain)), style="dim"))


def _links(chain: Sequence[str]) -> list[str]:
    return [link for link in chain if link]


def parted_at(finding: Finding) -> str:
    """The first step after which two chains that begin with the same number part."""
    left, right = finding.left.chain, finding.right.chain
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one == other:
            continue
        if position == 0 and _number(one) != _number(other):
            return ""
        if position:
            return f"after {left[position - 1].rsplit(' ', 1)[-1]}: {one}  |  {other}"
        ahead = left[1] if len(left) > 1 else one
        behind = other.removeprefix(_number(other)).strip() or other
        return f"after {_number(one)}: {ahead}  |  {behind}"
    return ""


def _number(link: str) -> str:
    return link.split(" ", 1)[0]


def _more(out: Console, report: Report) -> None:
    rest = report.groups[_MAX_GROUPS:]
    if rest:
        total = sum(group.count for group in rest)
        out.print(f"{plural(len(rest), 'more signature')} ({total:,} findings): see --json")
        out.print()


def _tolerated(out: Console, report: Report) -> None:
    if not report.tolerated:
        return
    out.print(plain("declared harmless (--strict counts these)", style="bold"))
    table = _grid()
    for contract, groups in _by_contract(report.tolerated).items():
        total = sum(group.count for group in groups)
        others = dict.fromkeys(_field(group) for group in groups[1:])
        others.pop(_field(groups[0]), None)
        likewise = f"; likewise {', '.join(others)}" if others else ""
        table.add_row(contract, f"{groups[0].first.sentence}{likewise} ({total:,} in all)")
        table.add_row("", plain(groups[0].first.tolerated or "", style="dim"))
    out.print(Padding(table, (0, 0, 1, 2)))


def _field(group: Group) -> str:
    return group.first.right.name.split(" after ", 1)[0].removesuffix(".rows")


def _by_contract(groups: Sequence[Group]) -> dict[str, list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.first.contract, []).append(group)
    return found
