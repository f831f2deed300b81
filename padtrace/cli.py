"""The command line: parse, call one function, render, exit code. No logic, no early imports.

Everything but typer is imported inside the commands, so that `--help` costs what typer costs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from padtrace.errors import EXIT_USAGE, PadtraceError
from padtrace.one_line import lines, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from padtrace.contracts.known import KnownReports
    from padtrace.recording.model import Recording

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70

app = typer.Typer(
    name="padtrace",
    help="Record, replay and check the padding decisions of an SGLang server.",
    epilog="Exit codes: 0 clean, 1 divergence, 2 usage, 3 bad recording, 4 SGLang or environment "
    "missing, 5 nothing observed, or nothing found but not every forward judged, 6 not reproduced.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecordingPath = Annotated[Path, typer.Argument(metavar="REC", help="A recording.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Count suspects, and what is declared harmless, as divergence."),
]
AllowUnjudged = Annotated[
    bool,
    typer.Option("--allow-unjudged", help="Exit 0 too where not every forward could be judged."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="ID", help="Only this contract, e.g. PT101; may be repeated."),
]
Known = Annotated[
    Path | None,
    typer.Option("--known", metavar="FILE", help="Known reports of your own, beside the shipped."),
]
Output = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write the recording.")
]
RecordFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder for the recording.")]
Tier = Annotated[str, typer.Option(help="shape, meta or full.")]
Ring = Annotated[str, typer.Option(help="Room for events per process, e.g. 64M.")]
UntilError = Annotated[
    bool, typer.Option("--until-error", help="End the server after the first error.")
]
SGLang = Annotated[
    str | None,
    typer.Option("--sglang", metavar="VERSION|PATH", help="Which SGLang; 'installed' for its own."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")]


@app.command()
def info(
    recording: RecordingPath,
    json: Json = False,
    share_check: Annotated[
        bool, typer.Option("--share-check", help="Prove what the file can and cannot hold.")
    ] = False,
) -> None:
    """Show what is in a recording."""
    from padtrace.report import info_view, json_output

    loaded = _read(recording)
    if share_check:
        from padtrace.report import share_view
        from padtrace.sharing.check import share_check_file

        proof = share_check_file(loaded, recording)
        if json:
            _write(json_output.text(proof.as_json()))
        else:
            share_view.print_share_check(_console(), proof, str(recording))
        raise typer.Exit(0 if proof.holds else 1)
    if json:
        _write(json_output.text(info_view.as_json(loaded, str(recording))))
    else:
        info_view.print_info(_console(), loaded, str(recording))


@app.command()
def redact(
    recording: RecordingPath,
    output: Annotated[
        Path, typer.Option("--out", "-o", metavar="OUT", help="Where to write the copy.")
    ],
    force: Force = False,
    json: Json = False,
) -> None:
    """Make a copy for a public issue: the same tables, no values of tensors, texts by the list."""
    from padtrace.report import json_output, share_view
    from padtrace.sharing.check import share_check
    from padtrace.sharing.document import redacted

    _refuse_to_overwrite(output, force)
    copy = redacted(_read(recording))
    proof = share_check(copy.recording)
    size = _save(copy.recording, output, force)
    if json:
        _write(json_output.text(share_view.redacted_as_json(copy, proof, output, size)))
    else:
        share_view.print_redacted(_console(), copy, proof, output, size)
    raise typer.Exit(0 if proof.holds else 1)


@app.command()
def show(
    recording: RecordingPath,
    step: Annotated[int | None, typer.Option(help="Only events of this step.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only events of this global rank.")] = None,
    forward: Annotated[int | None, typer.Option(help="Only events of this forward.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only events of this kind, e.g. pad.")] = None,
    limit: Annotated[int, typer.Option(help="Rows of the table; 0 for all.", min=0)] = 200,
    json: Json = False,
) -> None:
    """Show the events of a recording in order; with --json one object a line."""
    from padtrace.report import show_view

    loaded = _read(recording)
    chosen = show_view.select(loaded, step=step, rank=rank, forward=forward, kind=kind)
    if json:
        for line in show_view.json_lines(loaded, chosen):
            _write(line)
    else:
        show_view.print_events(_console(), loaded, chosen, limit=limit)


@app.command()
def ranks(
    recording: RecordingPath,
    step: Annotated[
        int | None, typer.Option(help="Which step; the first with a finding, else the last.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what every rank did in one step, side by side."""
    from padtrace.report import json_output, ranks_view

    loaded = _read(recording)
    result = ranks_view.side_by_side(loaded, ranks_view.step_to_show(loaded, step))
    if json:
        _write(json_output.text(result.as_json()))
    else:
        ranks_view.print_ranks(_console(), result)


@app.command()
def check(
    recording: RecordingPath,
    only: Only = None,
    strict: Strict = False,
    allow_unjudged: AllowUnjudged = False,
    known: Known = None,
    json: Json = False,
) -> None:
    """Check a recording against the contracts."""
    from padtrace.contracts.engine import check as check_recording
    from padtrace.report import json_output, terminal, verdicts

    loaded, reports = _read(recording), _known(known)
    report = check_recording(loaded, _ids(only), known=reports, strict=strict)
    judgement = verdicts.of_report(report, allow_unjudged=allow_unjudged)
    if json:
        found = json_output.findings_object(
            loaded, report, path=str(recording), allow_unjudged=allow_unjudged
        )
        _write(json_output.text(found))
    else:
        terminal.print_report(_console(), loaded, report, reports, judgement, path=str(recording))
    raise typer.Exit(judgement.exit_code)


@app.command()
def diff(
    recording: RecordingPath,
    other: Annotated[
        Path | None, typer.Argument(metavar="[REC]", help="A second recording to compare with.")
    ] = None,
    only: Only = None,
    strict: Strict = False,
    allow_unjudged: AllowUnjudged = False,
    known: Known = None,
    json: Json = False,
) -> None:
    """Tell q rows against num_splits rows, or compare two recordings field by field."""
    if other is None:
        _diff_rows(recording, only, strict, allow_unjudged, known, json)
    else:
        _diff_recordings(recording, other, only, strict, known, json)


def _diff_rows(
    path: Path,
    only: list[str] | None,
    strict: bool,
    allow_unjudged: bool,
    known: Path | None,
    json: bool,
) -> NoReturn:
    from padtrace.contracts.engine import check as check_recording
    from padtrace.report import json_output, ranks_view, rows_view, terminal, verdicts

    loaded, reports = _read(path), _known(known)
    report = check_recording(loaded, _ids(only), known=reports, strict=strict)
    judgement = verdicts.of_report(report, allow_unjudged=allow_unjudged)
    if json:
        found = json_output.findings_object(
            loaded, report, path=str(path), allow_unjudged=allow_unjudged
        )
        _write(json_output.text(found))
    else:
        out = _console()
        terminal.print_headline(out, judgement)
        rows_view.print_rows(out, loaded)
        ranks_view.print_divergent_step(out, loaded, report)
        terminal.print_report(
            out, loaded, report, reports, judgement, path=str(path), headline=False
        )
    raise typer.Exit(judgement.exit_code)


def _diff_recordings(
    path: Path,
    other_path: Path,
    only: list[str] | None,
    strict: bool,
    known: Path | None,
    json: bool,
) -> NoReturn:
    from padtrace.contracts.engine import check as check_recording
    from padtrace.explore.differences import compare
    from padtrace.report import differences_view, json_output, verdicts

    loaded, other, reports = _read(path), _read(other_path), _known(known)
    result = compare(loaded, other)
    report = check_recording(other, _ids(only), known=reports, strict=strict)
    verdict = verdicts.of_comparison(result)
    if json:
        _write(
            json_output.text(
                json_output.findings_object(
                    other,
                    report,
                    path=str(other_path),
                    differences=result,
                    compared_with=loaded,
                    verdict=verdict,
                )
            )
        )
    else:
        names = (str(path), str(other_path))
        differences_view.print_differences(_console(), result, names, (loaded, other))
    raise typer.Exit(verdicts.CODES[verdict])


@app.command()
def replay(
    recording: RecordingPath,
    sglang: Annotated[
        str | None,
        typer.Option(
            "--sglang",
            metavar="VERSION|PATH",
            help="A release, a folder (./0.5.18 is one), or 'installed'; by default the version "
            "that the file names. It is executed.",
        ),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="off, auto, reference or cuda: whether kernels are called.")
    ] = "auto",
    jobs: Annotated[
        int | None,
        typer.Option(help="Workers that share the ranks; by default as many as pay.", min=1),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|sm90|sm100|hip",
            help="The device SGLang is shown; by default what was recorded.",
        ),
    ] = None,
    output: Output = None,
    force: Force = False,
    only: Only = None,
    strict: Strict = False,
    allow_unjudged: AllowUnjudged = False,
    known: Known = None,
    json: Json = False,
) -> None:
    """Run the recorded decisions again through real SGLang, compare and check.

    This executes the SGLang that is named, on this machine. A recording can name a version, which
    is fetched as that release; a path or 'installed' comes from this command line alone.
    """
    from padtrace.report import replay_view

    loaded, reports = _read(recording), _known(known)
    view = replay_view.ReplayView(_console(), quiet=json)
    _refuse_to_overwrite(output, force)
    view.before(loaded, reports)
    # Not before the first line, which they would delay.
    from padtrace.explore.rerun import rerun
    from padtrace.report import json_output, verdicts

    with view.progress() as progress:
        outcome = rerun(
            loaded,
            sglang=sglang,
            kernels=kernels,
            only=_ids(only),
            known=reports,
            strict=strict,
            jobs=jobs,
            device=device,
            progress=progress,
        )
    if output is not None:
        _save(outcome.replayed, output, force)
    if json:
        _write(
            json_output.text(
                json_output.findings_object(
                    outcome.replayed,
                    outcome.deciding,
                    path=str(recording),
                    differences=outcome.differences,
                    compared_with=loaded,
                    verdict=outcome.verdict,
                    allow_unjudged=allow_unjudged,
                )
            )
        )
    else:
        view.after(outcome, reports, str(recording), output, allow_unjudged=allow_unjudged)
    raise typer.Exit(verdicts.exit_code(outcome.verdict, allow_unjudged=allow_unjudged))


@app.command()
def across(
    recording: RecordingPath,
    releases: Annotated[
        str | None,
        typer.Option("--releases", metavar="A,B", help="Releases; all padtrace is tested with."),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="off, auto, reference or cuda: whether kernels are called.")
    ] = "off",
    only: Only = None,
    strict: Strict = False,
    allow_unjudged: AllowUnjudged = False,
    known: Known = None,
    json: Json = False,
) -> None:
    """Replay a recording on many SGLang releases: first bad, first good, what changed.

    This executes each of these releases, on this machine.
    """
    from padtrace.explore.across import across as replay_across
    from padtrace.replay.releases import TESTED
    from padtrace.report import across_view, json_output, verdicts

    loaded, reports, out = _read(recording), _known(known), _console()
    with across_view.progress(out, quiet=json) as progress:
        result = replay_across(
            loaded,
            _names(releases) if releases is not None else TESTED,
            kernels=kernels,
            only=_ids(only),
            known=reports,
            strict=strict,
            progress=progress,
        )
    if json:
        found = across_view.as_json(result, str(recording), allow_unjudged=allow_unjudged)
        _write(json_output.text(found))
    else:
        across_view.print_across(out, result)
    raise typer.Exit(verdicts.exit_code(result.verdict, allow_unjudged=allow_unjudged))


@app.command()
def make(
    case: Annotated[Path, typer.Argument(metavar="CASE.json", help="A case, or a list of them.")],
    output: Annotated[
        Path, typer.Option("--out", "-o", metavar="REC", help="Where to write the recording.")
    ],
    plan: Annotated[
        str, typer.Option(help="auto, before or after: when metadata are planned.")
    ] = "auto",
    force: Force = False,
    json: Json = False,
) -> None:
    """Make the recording that a configuration would give before any padding."""
    from padtrace.explore import make as maker
    from padtrace.report import json_output

    _refuse_to_overwrite(output, force)
    made = maker.make(_read_json(case), plan=plan)  # type: ignore[arg-type]
    size = _save(made, output, force)
    if json:
        _write(json_output.text({"recording": str(output), "bytes": size}))
    else:
        _write(one_line(f"{output}: {size:,} bytes"))
        _write(one_line(f"next: padtrace replay {output} --sglang VERSION"))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def record(
    context: typer.Context,
    server_args: Annotated[
        str, typer.Option("--server-args", metavar="ARGS", help="Arguments of the SGLang server.")
    ] = "",
    out: RecordFolder = Path("recordings"),
    tier: Tier = "shape",
    ring: Ring = "64M",
    policy: Annotated[
        str, typer.Option(help="What a full ring keeps: last, first or error.")
    ] = "last",
    stop_after: Annotated[
        str | None, typer.Option(metavar="N|TIME", help="End the server after 500, 90s or 15m.")
    ] = None,
    until_error: UntilError = False,
    values: Annotated[
        str, typer.Option(metavar="SIZE", help="Values kept per process with meta and full.")
    ] = "64M",
    rings: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the rings are kept meanwhile, such as /dev/shm."),
    ] = None,
    alarm: Annotated[
        bool, typer.Option(help="Say at once when two lengths disagree, before the kernel.")
    ] = True,
    python: Annotated[str | None, typer.Option(help="The interpreter that has SGLang.")] = None,
    attach_config: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Print lines for docker, kubernetes or slurm and end."),
    ] = None,
) -> None:
    """Run an SGLang server under record; its own exit code is returned.

    Arguments after -- are given to the server as they are.
    """
    from padtrace.record import attach, launcher

    if attach_config is not None:
        _write(attach.attach_config(attach_config).strip())
        return
    _record(
        [*launcher.parse_server_arguments(server_args), *context.args],
        out=out,
        tier=tier,
        ring=ring,
        policy=policy,
        alarm=alarm,
        values=values,
        rings=rings,
        python=python or sys.executable,
        stop_after=launcher.parse_stop_after(stop_after) if stop_after else None,
        until_error=until_error,
    )


def _record(arguments: list[str], *, ring: str, values: str = "64M", **options: Any) -> NoReturn:
    from padtrace.record import launcher, settings
    from padtrace.report.record_view import RecordView

    view = RecordView(_console(stderr=True))
    result = launcher.run_record(
        arguments,
        ring_bytes=_usage(settings.parse_size, ring, "write --ring like 64M or 1G"),
        values_bytes=_usage(settings.parse_size, values, "write --values like 64M or 1G"),
        callbacks=launcher.Callbacks(view.line, view.status, view.first_error, view.started),
        **options,
    )
    view.ended(result)
    raise typer.Exit(result.exit_code)


@app.command()
def seal(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Ring folders.")],
    output: Annotated[
        Path, typer.Option("--out", "-o", metavar="REC", help="Where to write the recording.")
    ],
    force: Force = False,
    json: Json = False,
) -> None:
    """Merge the rings of one or several nodes into one recording."""
    from padtrace.record import seal as sealer
    from padtrace.report import json_output

    _refuse_to_overwrite(output, force)
    sealed = sealer.seal(folders)
    size = _save(sealed.recording, output, force)
    removed = sealer.remove_sealed(sealed)
    if json:
        result = {"recording": str(output), "bytes": size, "notes": sealed.notes + removed}
        _write(json_output.text({**result, "missing_ranks": sealed.missing_ranks}))
    else:
        told = (f"{output}: {size:,} bytes", *sealed.notes, *removed)
        _write("\n".join(map(one_line, (*told, f"next: padtrace diff {output}"))))


releases_app = typer.Typer(help="List, fetch, verify and remove SGLang releases.")
app.add_typer(releases_app, name="releases")


@releases_app.callback(invoke_without_command=True)
def releases(context: typer.Context, json: Json = False) -> None:
    """List the SGLang releases that are known and which of them are here."""
    if context.invoked_subcommand is None:
        from padtrace.replay import releases as store
        from padtrace.report import releases_view

        releases_view.print_releases(_console(), store.listed(), json=json)


@releases_app.command("fetch")
def releases_fetch(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION...")],
) -> None:
    """Fetch releases into the cache."""
    from padtrace.replay import releases as store

    for version in versions:
        _write(one_line(f"{version}: {store.fetch(version, say=_say)}"))


@releases_app.command("verify")
def releases_verify(
    versions: Annotated[list[str] | None, typer.Argument(metavar="[VERSION...]")] = None,
) -> None:
    """Check that cached releases are what was fetched."""
    from padtrace.replay import releases as store

    for version in versions or store.cached():
        _write(one_line(f"{version}: {store.verify(version)}"))


@releases_app.command("remove")
def releases_remove(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION...")],
) -> None:
    """Remove releases from the cache."""
    from padtrace.replay import releases as store

    for version in versions:
        store.remove(version)
        _write(one_line(f"{version}: removed"))


@app.command()
def explain(
    contract: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A contract, e.g. PT101; all without.")
    ] = None,
    json: Json = False,
) -> None:
    """Explain a contract, or list them all."""
    from padtrace.report import explain_view

    explain_view.print_contracts(_console(), contract, json=json)


@app.command()
def doctor(
    sglang: Annotated[
        str | None, typer.Option("--sglang", metavar="VERSION|PATH", help="Which SGLang.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what padtrace would hook in an SGLang, and whether it can replay on it."""
    from padtrace.record import native, targets
    from padtrace.replay import service
    from padtrace.report import doctor_view

    found = service.doctor(sglang)
    hooks = targets.doctor_rows(targets.source_look(Path(found.root)))
    raise typer.Exit(doctor_view.print_doctor(_console(), found, hooks, native.why_not, json=json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="dsa or dense: the tiny model to serve.")] = "dsa",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="DP attention size.", min=1)] = 1,
    sglang: SGLang = None,
    port: Annotated[int | None, typer.Option(help="Port on 127.0.0.1.")] = None,
    record: Annotated[bool, typer.Option(help="Run it under record.")] = True,
    out: RecordFolder = Path("recordings"),
    tier: Tier = "shape",
    ring: Ring = "64M",
    until_error: UntilError = False,
    log: Annotated[Path, typer.Option(help="The log, with --no-record.")] = Path("lab.log"),
    fix_30642: Annotated[
        bool, typer.Option("--fix-30642", help="Counter-test: align as sglang#30642 proposes.")
    ] = False,
) -> None:
    """Run a real SGLang server on this machine's CPU; arguments after -- go to the server.

    It runs in a private folder of its own, so paths among its arguments must be absolute.
    """
    from padtrace.lab import environment, launcher
    from padtrace.replay import releases

    setup = environment.LabSetup(
        model=environment.lab_model(model),
        root=releases.resolve(sglang, None, _say).root,
        tp=tp,
        dp=dp,
        port=port or environment.free_port(),
        extra=context.args,
        fix_30642=fix_30642,
    )
    if not record:
        raise typer.Exit(launcher.run_lab(setup, log_path=log, say=_say))
    _record(
        setup.arguments(),
        out=out,
        tier=tier,
        ring=ring,
        until_error=until_error,
        environment=setup.environment(os.environ),
        private=True,
    )


@app.command()
def version() -> None:
    """Print the version of padtrace."""
    from padtrace import __version__

    _write(f"padtrace {__version__}")


def _read(path: Path) -> Recording:
    _import_numpy()
    from padtrace.recording.reader import read

    return read(path)


def _import_numpy() -> None:
    """Import it without the threads of its linear algebra: they take time, and none is done here.

    The variable is put back, since children inherit it.
    """
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    os.environ[name] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[name]


def _save(recording: Recording, path: Path, force: bool) -> int:
    from padtrace.recording.writer import write

    return write(recording, path, force=force)


def _read_json(path: Path) -> Any:
    import msgspec

    from padtrace.errors import UsageError

    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}", f"{error.strerror}", "check the path") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no JSON", str(error), "see the README for a case") from error


def _refuse_to_overwrite(path: Path | None, force: bool) -> None:
    """Before the work, not after it."""
    from padtrace.errors import UsageError

    if path is not None and path.exists() and not force:
        raise UsageError(
            f"{path} exists already",
            "padtrace does not overwrite a recording unasked",
            "choose another name, or add --force",
        )


def _known(path: Path | None) -> KnownReports:
    from padtrace.contracts.known import KnownReports

    return KnownReports.shipped(path)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _ids(only: list[str] | None) -> set[str] | None:
    return {part.strip().upper() for text in only for part in text.split(",")} if only else None


def _usage(parse: Callable[[str], int], text: str, hint: str) -> int:
    from padtrace.errors import UsageError

    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(str(error), "", hint) from error


def _console(*, stderr: bool = False) -> Console:
    from padtrace.report.words import console

    return console(sys.stderr if stderr else sys.stdout)


def _write(text: str) -> None:
    """JSON, or lines of our own; what holds a name from outside is one line already."""
    sys.stdout.write(lines(text) + "\n")


def _say(text: str) -> None:
    sys.stderr.write(one_line(text) + "\n")


def main() -> NoReturn:
    """The script entry: every error becomes lines on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        # Where the terminal's encoding lacks a letter of a name, its escape will do.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="padtrace")
    except PadtraceError as error:
        _fail(error, error.lines(), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ModuleNotFoundError as error:
        told = [f"this part of padtrace needs {error.name}", "it cannot be imported here"]
        _fail(error, [*told, "reinstall padtrace; PADTRACE_DEBUG=1 shows where"], EXIT_USAGE)
    except Exception as error:
        told = [f"internal error: {type(error).__name__}: {error}", "this is a bug in padtrace"]
        _fail(error, [*told, "PADTRACE_DEBUG=1 shows the traceback to report"], EXIT_INTERNAL)
    sys.exit(0)


def _fail(error: BaseException, told: list[str], code: int) -> NoReturn:
    if os.environ.get("PADTRACE_DEBUG") == "1":
        raise error
    first, *rest = told or [type(error).__name__]
    for line in (f"padtrace: {first}", *(f"  {line}" for line in rest)):
        _say(line)
    sys.exit(code)
