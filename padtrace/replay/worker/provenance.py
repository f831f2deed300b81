"""Lengths that remember the arithmetic that made them.

SGLang's small arithmetic helpers are wrapped in the modules that call them: the original computes,
and its result, an `int` that is also a `Traced`, carries the steps so far. Where SGLang's own code
drops a `Traced` (a sum, a division), the chain ends and a new one starts at the plain number.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

Chain = tuple[str, ...]


class Traced(int):
    """An integer with the chain of steps that made it."""

    chain: Chain

    @classmethod
    def of(cls, value: int, chain: Chain) -> Traced:
        made = cls(value)
        made.chain = chain
        return made


def chain_of(value: int) -> Chain:
    """The steps that made a number; a plain number is its own origin."""
    return value.chain if isinstance(value, Traced) else (str(int(value)),)


class Provenance:
    """Wraps the helpers of one release and keeps what the wrappers saw last.

    Attributes:
        mode_counts: the per-rank counts of the last padding-mode choice.
        mode: its outcome, by name.
        sizes: (token rows, requests) of the last `_pad_inputs_to_size`.
        padded_tokens: the last result of `cal_padded_tokens`.
        planned: rows given to `_compute_flashmla_metadata`, and of its num_splits, per call.
    """

    def __init__(self) -> None:
        self.enabled = True
        self.forget()

    def forget(self) -> None:
        """Forget everything seen; called before each event."""
        self.mode_counts: list[int] = []
        self.mode: str | None = None
        self.sizes: list[tuple[int, int]] = []
        self.padded_tokens: int | None = None
        self.planned: list[tuple[int, int]] = []

    def wrap_arithmetic(self, modules: Sequence[ModuleType | None]) -> None:
        """Wrap `ceil_align`, `ceil_div` and the CP alignment wherever these modules hold them."""
        wrapped: dict[int, Any] = {}
        makers = {"ceil_align": self._binary, "ceil_div": self._binary}
        for module in modules:
            for name, maker in makers.items():
                original = getattr(module, name, None)
                if module is not None and callable(original):
                    if id(original) not in wrapped:
                        wrapped[id(original)] = maker(name, original)
                    setattr(module, name, wrapped[id(original)])

    def wrap_mode(self, padding_mode: Any) -> None:
        """Wrap the padding-mode choice; it stays a class method."""
        original = padding_mode.get_dp_padding_mode.__func__

        def get_dp_padding_mode(
            cls: Any, /, is_extend_in_batch: Any, global_num_tokens: Any, **kwargs: Any
        ) -> Any:
            mode = original(cls, is_extend_in_batch, global_num_tokens, **kwargs)
            self.mode_counts, self.mode = list(global_num_tokens), mode.name
            return mode

        type.__setattr__(padding_mode, "get_dp_padding_mode", classmethod(get_dp_padding_mode))

    def wrap_sizes(self, batch_class: Any) -> None:
        """See what `_pad_inputs_to_size` is asked for."""
        original = batch_class._pad_inputs_to_size

        def _pad_inputs_to_size(batch: Any, runner: Any, num_tokens: int, bs: int) -> Any:
            self.sizes.append((num_tokens, bs))
            return original(batch, runner, num_tokens, bs)

        batch_class._pad_inputs_to_size = _pad_inputs_to_size

    def wrap_padded_tokens(self, utils: ModuleType) -> None:
        """See what `cal_padded_tokens` decides."""
        original = getattr(utils, "cal_padded_tokens", None)
        if original is None:
            return

        def cal_padded_tokens(batch: Any) -> Any:
            tokens = original(batch)
            self.padded_tokens = tokens
            return tokens

        utils.cal_padded_tokens = cal_padded_tokens  # type: ignore[attr-defined]

    def scaled(self, before: Sequence[int], after: Sequence[int], width: int | None) -> list[Any]:
        """The counts after spec scaling, each with the step from the scheduler's count."""
        if not self.enabled:
            return list(after)
        return [
            Traced.of(new, (str(old), f"x num_tokens_per_req={width} -> {new}"))
            if old != new or width not in (None, 1)
            else new
            for old, new in zip(before, after, strict=True)
        ]

    def rows_chain(self, rows: int, base: int) -> Chain:
        """The chain of a row count that came out as `rows` from the number `base`."""
        chain = chain_of(base)
        if self.mode == "MAX_LEN" and len(self.mode_counts) > 1:
            listed = ", ".join(str(int(count)) for count in self.mode_counts[:8])
            more = ", ..." if len(self.mode_counts) > 8 else ""
            chain = (*chain, f"MAX_LEN over ranks [{listed}{more}] -> {max(self.mode_counts)}")
        if not chain[-1].endswith(str(int(rows))):
            chain = (*chain, f"-> {rows}")
        return chain

    def _binary(self, name: str, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def wrapper(value: Any, by: Any) -> Any:
            result = original(value, by)
            if not self.enabled or isinstance(result, bool) or not isinstance(result, int):
                return result
            chain = value.chain if value.__class__ is Traced else chain_of(value)
            if result != value or by != 1:
                label = _argument_name(sys._getframe(1))
                chain = (*chain, f"{name}({label}={int(by)}) -> {int(result)}")
            traced = Traced(result)
            traced.chain = chain
            return traced

        return wrapper


_NAMES: dict[tuple[CodeType, int], str] = {}


def _argument_name(frame: Any) -> str:
    """What SGLang's source calls the second argument, without its `_size`."""
    key = (frame.f_code, frame.f_lineno)
    if key not in _NAMES:
        _NAMES[key] = _parse_argument(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    return _NAMES[key]


def _parse_argument(line: str) -> str:
    try:
        tree = ast.parse(line.strip())
    except SyntaxError:
        return "by"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 2:
            text = ast.unparse(node.args[1]).rsplit(".", 1)[-1]
            return text.removesuffix("_size")
    return "by"
