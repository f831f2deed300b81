"""PT102 to PT106: every per-row field beside num_splits (kinds T1 and T2)."""

from __future__ import annotations

import numpy as np

from padtrace.contracts import wording
from padtrace.contracts.common import Place, Side, hold, pad_place, rows_of
from padtrace.contracts.evidence import Evidence, present
from padtrace.contracts.model import Contract, Evaluation, Finding, Severity
from padtrace.contracts.rows import num_splits_expected
from padtrace.contracts.sites import (
    branches_of,
    launch_sites,
    modes_of,
    pad_sites,
    real_rows,
    unpadded_sites,
    with_plans,
)
from padtrace.recording.absent import NOT_OBSERVED_CODE
from padtrace.recording.columns import Int64Array

# Modes in which the page table has one row per row of q; otherwise it has one per request.
PER_ROW_MODES = ("DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
_TABLES = ("page_table_1.rows", "dsa_seqlens_expanded.rows")
_SEQLENS_CHECK = 'the kernel stops on this: "seqlens_k must have shape (batch_size)"'


def page_table(evidence: Evidence) -> Evaluation:
    """The page table of the live plan covers the rows of q."""
    result = Evaluation()
    for sites in (pad_sites(evidence), unpadded_sites(evidence)):
        sites = with_plans(evidence, sites, _planned_tables(evidence))
        modes = modes_of(evidence, sites)
        mask = (sites.plans >= 0) & evidence.is_text(modes, *PER_ROW_MODES)
        mask &= ~present(evidence.at("plan", "graph_bucket", sites.plans))
        chosen = sites.select(mask)
        place = Place(chosen.kind, chosen.rows, modes[mask], chosen.plans, chosen.pads)
        # The branches of a draft step share the entry of their request.
        branches = branches_of(evidence, chosen.kind, chosen.rows)
        # Rows that hold a request must be covered in any case.
        real = real_rows(evidence, chosen.pads)
        for name in _TABLES:
            rows = evidence.at("plan", name, chosen.plans)
            covered = np.where(present(rows), rows, 0) * branches
            hold(
                evidence,
                result,
                place,
                Side("q.rows", chosen.q_rows),
                Side(name, rows),
                expected=_per_branch(chosen.q_rows, branches),
                broken=covered < chosen.q_rows,
                harmless=covered >= real,
                outcome="rows of q without an entry: nothing stops, they may read another's pages",
            )
    return result


def _per_branch(q_rows: Int64Array, branches: Int64Array) -> Int64Array:
    return np.where(present(q_rows), -(-np.where(present(q_rows), q_rows, 0) // branches), q_rows)


def _planned_tables(evidence: Evidence) -> Int64Array:
    """Plans that made a table per row of q, whether or not they made num_splits."""
    made = np.zeros(evidence.count("plan"), dtype=np.bool_)
    for name in (*_TABLES, "num_splits.rows"):
        made |= present(evidence.column("plan", name))
    return np.flatnonzero(made).astype(np.int64)


def page_table_sentence(evidence: Evidence, finding: Finding) -> str:
    splits = wording.number(evidence, "plan", "num_splits.rows", finding.plan_row)
    right, q_rows = finding.right, finding.left.value
    fits = f" beside a num_splits of {splits} that fits" if splits == (q_rows or 0) + 1 else ""
    planned = f" planned {finding.planned}" if finding.planned else ""
    who = f"an idle rank ({finding.worker} worker)"
    if finding.mode != "IDLE":
        who = wording.who(finding)
    return (
        f"{right.name.removesuffix('.rows')} {right.value}, q has {q_rows} rows: the metadata of "
        f"{who}{planned} cover fewer rows than q has{fits}"
    )


def one_view(evidence: Evidence) -> Evaluation:
    """All per-row fields of one plan count the same rows."""
    result = Evaluation()
    rows = rows_of(evidence, "plan")
    modes = evidence.snapshot("plan", "entry", "forward_mode", rows)
    place = Place("plan", rows, modes, rows)
    table = evidence.column("plan", "page_table_1.rows")
    per_row = evidence.is_text(modes, *PER_ROW_MODES)
    eager = ~present(evidence.column("plan", "graph_bucket"))
    expanded = _where(per_row & eager, evidence.column("plan", "dsa_seqlens_expanded.rows"))
    hold(
        evidence, result, place,
        Side("page_table_1.rows", table), Side("dsa_seqlens_expanded.rows", expanded),
        harmless=np.zeros(rows.shape, dtype=np.bool_),
        outcome="nothing stops; the indexer sees other rows than the page table has",
    )  # fmt: skip
    pairs = (
        ("page_table_1.rows", "cu_seqlens_q.rows"),
        ("cache_seqlens_int32.rows", "cu_seqlens_k.rows"),
        ("dsa_cache_seqlens_int32.rows", "dsa_cu_seqlens_q.rows"),
        ("dsa_cache_seqlens_int32.rows", "dsa_cu_seqlens_k.rows"),
    )
    for left, right in pairs:
        values = evidence.column("plan", left)
        hold(
            evidence, result, place,
            Side(left, values),
            Side(right, _where(eager, evidence.column("plan", right))),
            expected=np.where(present(values), values + 1, values),
            outcome="nothing stops; a running sum ends before the last row",
        )  # fmt: skip
    return result


def one_view_sentence(evidence: Evidence, finding: Finding) -> str:
    right = finding.right
    function = evidence.text(int(evidence.column("plan", "function")[finding.row])) or "the plan"
    return (
        f"{right.name.removesuffix('.rows')} {right.value}, needs {right.expected}: one plan of "
        f"{wording.who(finding)} counts its rows in two ways ({function} made "
        f"{finding.left.name.removesuffix('.rows')} {finding.left.value})"
    )


def launch_lengths(evidence: Evidence) -> Evaluation:
    """cache_seqlens of a FlashMLA call has one entry per row of q."""
    result = Evaluation()
    place, q_rows = _launches(evidence)
    lengths = evidence.column("launch", "cache_seqlens.rows")
    splits = evidence.column("launch", "num_splits.rows")
    # Where num_splits does not fit either, PT101 tells the one fault behind both.
    fits = present(splits) & (splits == q_rows + num_splits_expected(0))
    result.skip("the call breaks PT101 already", int((present(splits) & ~fits).sum()))
    hold(
        evidence, result, place,
        Side("q.rows", _where(fits, q_rows)), Side("cache_seqlens.rows", lengths),
        outcome=_SEQLENS_CHECK,
    )  # fmt: skip
    return result


def launch_tables(evidence: Evidence) -> Evaluation:
    """The page table and the top-k indices of a FlashMLA call have one row per row of q."""
    result = Evaluation()
    place, q_rows = _launches(evidence)
    splits = present(evidence.column("launch", "num_splits.rows"))
    for name in ("indices", "block_table"):
        rows = evidence.vector_items(evidence.column("launch", f"{name}.shape"), 0)
        hold(
            evidence, result, place,
            Side("q.rows", _where(splits, q_rows)), Side(f"{name}.rows", rows),
            outcome=f"the kernel stops on this: {name} must have one row per row of q",
        )  # fmt: skip
    return result


def batch_rows(evidence: Evidence) -> Evaluation:
    """After the pad, every per-token field has as many rows as input_ids, and so on."""
    result = Evaluation()
    place = pad_place(evidence)
    groups = {
        "input_ids.rows": ("positions.rows", "out_cache_loc.rows"),
        "batch_size": ("seq_lens.rows", "req_pool_indices.rows", "seq_lens_cpu.rows"),
    }
    for left, names in groups.items():
        values = evidence.snapshot("pad", "exit", left, place.rows)
        for name in names:
            rows = evidence.snapshot("pad", "exit", name, place.rows)
            hold(
                evidence, result, place,
                Side(left, values), Side(name, rows),
                outcome="nothing stops at once: a row without a slot, or a slot without a row",
            )  # fmt: skip
    return result


def batch_rows_sentence(evidence: Evidence, finding: Finding) -> str:
    return (
        f"{finding.right.name.removesuffix('.rows')} {finding.right.value}, needs "
        f"{finding.right.expected}: the pad of {wording.who(finding)} left it at another length "
        f"than {finding.left.name.removesuffix('.rows')}"
    )


def launch_sentence(evidence: Evidence, finding: Finding) -> str:
    name = finding.right.name.removesuffix(".rows")
    return (
        f"{name} {finding.right.value}, needs {finding.right.expected}: a FlashMLA call of "
        f"{wording.who(finding)} got q of {finding.left.value} rows"
    )


def _launches(evidence: Evidence) -> tuple[Place, Int64Array]:
    sites = launch_sites(evidence)
    modes = modes_of(evidence, sites)
    return Place("launch", sites.rows, modes, sites.plans, sites.pads), sites.q_rows


def _where(mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], values: Int64Array) -> Int64Array:
    return np.where(mask, values, NOT_OBSERVED_CODE)


CONTRACTS = (
    Contract(
        "PT102",
        "page table rows",
        ("T1", "T2"),
        "the plan's page table and expanded lengths cover every row of q",
        Severity.SILENT,
        """
Whatever kernel is called: in decode, verify, draft-extend and idle forwards the token-granular page
table and the expanded KV lengths have one row per row of q (of a draft step with top-k above 1, one
per request, which its branches share). A num_splits of the right length hides that they are
shorter: `cal_padded_tokens` lengthens only what FlashMLA gets.

On CUDA the DSA indexer cuts q to the rows the plan counted and fills the rest with -1, so padded
rows may lack an entry; rows of real requests may not. On ROCm nothing fills the difference
(sglang#33059, sglang#34455). What a backend puts up with is declared in `tolerances.json`.
""",
        page_table,
        page_table_sentence,
    ),
    Contract(
        "PT103",
        "one plan, one row count",
        ("T1", "T2"),
        "the per-row fields of one plan count the same rows",
        Severity.SILENT,
        """
page_table_1, dsa_seqlens_expanded and the running sums (one entry more) of one plan come from
different sources: some from the padded request count, some from `extend_num_tokens`, which the pad
leaves alone. A draft-extend planned after the pad has 16 rows in one and 4 in the other, while
num_splits looks right.
""",
        one_view,
        one_view_sentence,
    ),
    Contract(
        "PT104",
        "cache_seqlens rows",
        ("T2",),
        "cache_seqlens of a FlashMLA call has one entry per row of q",
        Severity.CRASH,
        """
The kernel reads one KV length per row of q and checks the length of the vector: "seqlens_k must
have shape (batch_size)" (sglang#18943). Judged only at recorded calls.
""",
        launch_lengths,
        launch_sentence,
    ),
    Contract(
        "PT105",
        "indices and block table rows",
        ("T2", "T9"),
        "the tables given to a FlashMLA call have one row per row of q",
        Severity.CRASH,
        """
The top-k indices and the block table are read row by row beside q. The kernel checks both. Judged
only at recorded calls.
""",
        launch_tables,
        launch_sentence,
    ),
    Contract(
        "PT106",
        "rows of the padded batch",
        ("T2",),
        "after the pad the per-token fields are as long as input_ids, the per-request ones as bs",
        Severity.SILENT,
        """
The pad lengthens each field by itself. A field it forgets is shorter than the others from then on:
a row of q without a position, or one that writes its KV to no slot (sglang#30354: expected 4, got
7).
""",
        batch_rows,
        batch_rows_sentence,
    ),
)
