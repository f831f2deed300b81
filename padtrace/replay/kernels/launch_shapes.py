"""One recorded launch as numbers, the bounds inside which it is rebuilt, what can come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from padtrace.errors import BadRecordingError

# Told in :class:`~padtrace.replay.kernels.launch.LaunchResult`.
Outcome = Literal[
    "pass", "refused", "undefined", "not-covered", "not-called", "ended", "interrupted"
]

_MAX_DIMENSIONS = 6
_MAX_DIMENSION = 2**31 - 1
_MAX_ROWS = 1 << 20
_DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "int8",
    "uint8",
    "int32",
    "int64",
)


@dataclass(frozen=True)
class LaunchLimits:
    """What a rebuilt launch may cost.

    Attributes:
        max_bytes: argument tensors together; beyond it the reference judges shapes only and a
            real kernel is not called.
        max_work: multiply-adds of the reference's attention; beyond it it judges shapes only.
    """

    max_bytes: int = 1 << 30
    max_work: int = 5_000_000_000


@dataclass(frozen=True)
class LaunchShapes:
    """What a recording holds of one FlashMLA launch; shapes as the kernel got them.

    Attributes:
        q_shape: (b, s_q, h_q, d_qk).
        num_splits_rows: length of ``num_splits``; None where the call carried none.
        num_splits: its values, where they were recorded.
        cache_seqlens_rows: length of ``cache_seqlens``.
        cache_seqlens: its values, where they were recorded.
        indices_shape: (b, s_q, topk); None for a dense launch.
        block_table_shape: (b, max_num_blocks_per_seq); (b, 0) is usual for a sparse launch.
        page_size: tokens per page.
        head_dim_v: width of the value part.
        num_heads_k: heads of the cache.
        bytes_per_token: last dimension of a sparse launch's cache; None means 656 (d_qk 576) or
            584.
        q_dtype: torch's name, without ``torch.``.
        k_cache_dtype: the same for the cache; None means float8_e4m3fn, or q's for dense.
        softmax_scale: None means d_qk ** -0.5.
        causal: as passed.
        is_fp8_kvcache: as passed; None means True for a sparse launch.
        topk_length: values, where the launch passed them.
    """

    q_shape: Sequence[int]
    num_splits_rows: int | None = None
    num_splits: Sequence[int] | None = None
    cache_seqlens_rows: int | None = None
    cache_seqlens: Sequence[int] | None = None
    indices_shape: Sequence[int] | None = None
    block_table_shape: Sequence[int] | None = None
    page_size: int = 64
    head_dim_v: int = 512
    num_heads_k: int = 1
    bytes_per_token: int | None = None
    q_dtype: str = "bfloat16"
    k_cache_dtype: str | None = None
    softmax_scale: float | None = None
    causal: bool = False
    is_fp8_kvcache: bool | None = None
    topk_length: Sequence[int] | None = None

    @property
    def q_rows(self) -> int:
        """The first dimension of q; 0 for a q without dimensions."""
        return self.q_shape[0] if self.q_shape else 0

    @property
    def splits_rows(self) -> int | None:
        """Length of ``num_splits``, from its values or its recorded length."""
        return len(self.num_splits) if self.num_splits is not None else self.num_splits_rows

    def check(self) -> None:
        """Refuse numbers that no launch can have.

        Raises:
            BadRecordingError: names the field and the number.
        """
        for name in ("q_shape", "indices_shape", "block_table_shape"):
            shape = getattr(self, name)
            if shape is not None:
                _check_shape(name, shape)
        rows = {
            "q rows": self.q_rows,
            "num_splits rows": self.splits_rows,
            "cache_seqlens rows": self.cache_seqlens_rows,
            "cache_seqlens values": None if self.cache_seqlens is None else len(self.cache_seqlens),
            "topk_length values": None if self.topk_length is None else len(self.topk_length),
            "page_size": self.page_size,
            "head_dim_v": self.head_dim_v,
            "num_heads_k": self.num_heads_k,
            "bytes_per_token": self.bytes_per_token,
        }
        for name, number in rows.items():
            if number is not None:
                _check_number(name, number, _MAX_ROWS)
        for name in ("num_splits", "cache_seqlens", "topk_length"):
            for value in getattr(self, name) or ():
                _check_number(f"a value of {name}", value, _MAX_DIMENSION, -_MAX_DIMENSION - 1)
        for name in ("q_dtype", "k_cache_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in _DTYPES:
                raise _bad(f"{name} is {dtype!r}", "a launch has one of: " + ", ".join(_DTYPES))


def _check_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) > _MAX_DIMENSIONS:
        raise _bad(f"{name} has {len(shape)} dimensions", f"a launch has {_MAX_DIMENSIONS} or less")
    for size in shape:
        _check_number(f"a dimension of {name}", size, _MAX_DIMENSION)


def _check_number(name: str, number: object, most: int, least: int = 0) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise _bad(f"{name} is {number!r}", "a whole number is needed")
    if not least <= number <= most:
        raise _bad(f"{name} is {number}", f"a launch has {least} to {most}")


def _bad(what: str, why: str) -> BadRecordingError:
    return BadRecordingError(
        f"a launch event cannot be rebuilt: {what}",
        why,
        "the recording is damaged or was made by something else; record again",
    )
