"""Prints the schema as the page `docs/recording-format.md`, so that page and code agree."""

from __future__ import annotations

import textwrap

from padtrace.recording import columns, limits, reader, schema, value_tensors

_FULL = value_tensors.FULL_FIELDS

_OPENING = f"""# The recording format

<!-- Written by `make docs` from padtrace/recording/schema.py. A test holds them together. -->

A recording is one `.safetensors` file of format `{schema.FORMAT_NAME}/{schema.FORMAT_VERSION}`.
It opens with the plain safetensors library and explains itself there: `__metadata__` holds the same
tables as this page.

## Metadata

Every entry of `__metadata__` is a string; all but the first and last are JSON.

| key | holds |
| --- | --- |
| `format` | `{schema.FORMAT_NAME}/VERSION`; a reader refuses a version it does not know |
| `about` | where it came from: source (`server`, `made`, `replay`), tier, SGLang release |
| `tables` | for every table its rows, for every column its type, unit, meaning, encoding, dtype |
| `absent` | the codes of the three kinds of absent |
| `strings` | what string columns index |
| `facts` | one object per process: server arguments, sizes and ranks, workers, fingerprints |
| `coverage` | what each hook saw, and what could not be seen; why a ring was in shared memory |
| `values` | element type on the server of every tensor under `values/` |
| `digests` | BLAKE2b (16 bytes) of every tensor |
| `metadata_digest` | the same over all other entries |

## Columns

A column is one tensor `TABLE/COLUMN` of the narrowest signed integer type that holds it. Its
encoding stands in `tables`:

- `plain`: the values.
- `constant`: no tensor; the value stands in `tables`.
- `delta`: steps to the row before. At the rows in `TABLE/COLUMN.fresh_rows` the value starts afresh
  from `TABLE/COLUMN.fresh_values`.
- `dictionary`: indices into `TABLE/COLUMN.dictionary`.
- `same`: no tensor; the column that `as` names (`TABLE/COLUMN`) has the very same values.

Absent values are the three lowest numbers of the stored type, in this order: None (SGLang held
None), no attribute (this release has no such attribute), not observed (nobody looked). Constants
count as int64. `show --json` prints them as `null`, `"no attribute"` and `"not observed"`.

Types: `int` and `bool` are numbers; `string` indexes `strings`; `vector` is a row of the ragged
table `vector` (`vector/offsets` has one entry more than rows, row i is
`vector/values[offsets[i]:offsets[i + 1]]`); `strings` is such a row whose values index `strings`;
`snapshot` is a row of the table `snapshot`. Equal vectors and snapshots are stored once.

Rows of event tables are sorted by process and order of entry. Columns may be added by later
versions; an older file then reads as "not observed" there. Columns marked "always" place an event:
a reader refuses a file that holds an absent code there.

## Limits

A reader refuses what exceeds one of these. The writer cuts longer strings, with a mark
(`... [cut: 5000 characters]`), and leaves out what is nested deeper.

| of | at most |
| --- | --- |
| a string, as a key too | {limits.MAX_STRING:,} characters |
| entries of `strings` | {limits.MAX_STRINGS:,} |
| nesting of `about`, `coverage`, `facts` | {limits.MAX_DEPTH} levels |
| `about`, `coverage`, the mean object of `facts` | {limits.MAX_OBJECT_BYTES >> 20} MiB |
| lists and objects in each of these entries | {limits.MAX_CONTAINERS:,} |
| processes | {limits.MAX_PROCESSES:,} |
| ranks of a server, any size or rank in `process` | {limits.MAX_RANKS:,} |
| integers in JSON | 64 bits |
| items of one vector | {reader.MAX_VECTOR_VALUES_PER_ROW:,} |
| the header of the file | {reader.MAX_HEADER_BYTES >> 20} MiB |
| the file | {reader.MAX_FILE_BYTES >> 30} GiB |

The known keys of `about`, `coverage` and `facts` have types
(`padtrace/recording/about.py`, `coverage.py`, `facts.py`); others may be added and are kept.
"""


def _wrapped(names: tuple[str, ...]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names) + ".", 100)


_VALUES = f"""## Values of tensors

Files of tier `shape` hold none. With tiers `meta` and `full` the tensor
`values/PROCESS/ENTER_SEQ/FIELD` holds what a device tensor held at one event, in the server's
shape; `entry.` or `exit.` before the field says when, where the event has both. Everything is
stored as signed integers, other types by their bits; the element type on the server stands in
`values`. `coverage.blind.values` counts per process what was kept, dropped and overwritten.

`meta` holds integers only:

{_wrapped(value_tensors.META_FIELDS)}

`full` also holds, of the first of equal launches, {", ".join(f"`{n}`" for n in _FULL[:-1])} or
`{_FULL[-1]}`: a row of the cache for each entry of `indices`, or a page for each of `block_table`,
both as bytes; where the entry is negative, the first one.
"""


def markdown() -> str:
    """The whole page."""
    assert set(columns.ENCODINGS) == {"constant", "plain", "delta", "dictionary", "same"}
    parts = [
        _OPENING,
        _section("Header of every event", "Present in each event table.", schema.HEADER),
    ]
    for table in (schema.PROCESS, schema.SNAPSHOT, *schema.EVENTS):
        parts.append(_section(f"Table `{table.name}`", f"{table.meaning}.", table.columns))
    return "\n".join([*parts, _VALUES])


def _section(title: str, opening: str, rows: tuple[schema.Column, ...]) -> str:
    lines = [f"## {title}", "", opening[0].upper() + opening[1:], ""]
    lines += ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    for column in rows:
        kind = column.type.value if column.optional else f"{column.type.value}, always"
        lines.append(f"| `{column.name}` | {kind} | {column.unit} | {column.meaning} |")
    return "\n".join(lines) + "\n"
