"""Public reports with the signature of their findings, and which of them a finding resembles.

The shipped reports are data (`known_reports.json`); people can add a file of their own in the same
form.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from padtrace.contracts.releases import in_range
from padtrace.errors import UsageError

if TYPE_CHECKING:
    from padtrace.contracts.evidence import Evidence
    from padtrace.contracts.model import Finding


class Signature(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a finding must look like; an empty field asks for nothing.

    Attributes:
        contract: ids of contracts.
        sign: shorter or longer.
        planned: before the pad or after the pad.
        modes, workers: by name.
        events: kinds of the event.
        functions: the hooked function, for errors.
        first_release, last_release: SGLang releases that have the fault, both included.
        min_attn_tp, min_attn_cp: smallest sizes at which it shows.
        roles: prefill or decode, for disaggregated servers.
        devices: accelerator kinds.
    """

    contract: list[str] = []
    sign: str | None = None
    planned: str | None = None
    modes: list[str] = []
    workers: list[str] = []
    events: list[str] = []
    functions: list[str] = []
    first_release: str | None = None
    last_release: str | None = None
    min_attn_tp: int = 1
    min_attn_cp: int = 1
    roles: list[str] = []
    devices: list[str] = []


class KnownReport(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One public report.

    Attributes:
        id: `project#number`.
        title: in own words.
        signature: what findings of it look like; several where it shows in several ways.
        conclusion: what the thread ended with, in own words.
        avoid: a flag or setting that avoids it, if one is known.
        fixed_in: first release without it, if any.
    """

    id: str
    title: str
    signatures: list[Signature]
    conclusion: str = ""
    avoid: str = ""
    fixed_in: str | None = None


class KnownReports:
    """All known reports, the shipped ones first."""

    def __init__(self, reports: list[KnownReport]) -> None:
        self.reports = reports
        self._by_id = {report.id: report for report in reports}

    @classmethod
    def shipped(cls, extra: Path | None = None) -> KnownReports:
        """The shipped reports, and those of a file of the user's.

        Raises:
            UsageError: the user's file cannot be read.
        """
        text = resources.files("padtrace.contracts").joinpath("known_reports.json").read_bytes()
        reports = msgspec.json.decode(text, type=list[KnownReport])
        if extra is not None:
            reports += _read(extra)
        return cls(reports)

    def get(self, report_id: str) -> KnownReport | None:
        return self._by_id.get(report_id)

    def matching(self, evidence: Evidence, finding: Finding) -> list[KnownReport]:
        """Reports one of whose signatures the finding has, in file order."""
        return [
            report
            for report in self.reports
            if any(_matches(signature, evidence, finding) for signature in report.signatures)
        ]


def _read(path: Path) -> list[KnownReport]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[KnownReport])
    except OSError as error:
        raise UsageError(
            f"cannot read the known reports in {path}", f"{error.strerror}", "check the path"
        ) from error
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{path} is no list of known reports",
            str(error),
            "copy an entry of padtrace/contracts/known_reports.json and change it",
        ) from error


def _matches(signature: Signature, evidence: Evidence, finding: Finding) -> bool:
    facts = evidence.facts(finding.process)
    release = evidence.release(finding.process)
    role = evidence.text(int(evidence.column("process", "role")[finding.process]))
    wanted: list[tuple[list[str] | str | None, str | None]] = [
        (signature.contract, finding.contract),
        (signature.sign, finding.sign),
        (signature.planned, finding.planned),
        (signature.modes, finding.mode),
        (signature.workers, finding.worker),
        (signature.events, finding.event),
        (signature.functions, _function(evidence, finding)),
        (signature.roles, role),
        (signature.devices, facts.device.type),
    ]
    return (
        all(_allows(allowed, value) for allowed, value in wanted)
        and in_range(release, signature.first_release, signature.last_release)
        and facts.parallel.attn_tp_size >= signature.min_attn_tp
        and facts.parallel.attn_cp_size >= signature.min_attn_cp
    )


def _function(evidence: Evidence, finding: Finding) -> str | None:
    """The function an error left, without its module."""
    if finding.event != "error":
        return None
    name = evidence.text(int(evidence.column("error", "function")[finding.row]))
    return name.rsplit(".", 1)[-1] if name else None


def _allows(allowed: list[str] | str | None, value: str | None) -> bool:
    if not allowed:
        return True
    return value == allowed if isinstance(allowed, str) else value in allowed
