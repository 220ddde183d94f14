"""Progress: the bar that `LLM` shows while a batch runs, with vLLM's estimate of the speed."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

UseTqdm = bool | Callable[..., "tqdm[Any]"]
"""Whether there is a bar, or what makes it, such as `functools.partial(tqdm, leave=False)`."""


class Progress:
    """Counts finished prompts. The bar's postfix has the tokens a second of the finished prompts and of their outputs,
    since the bar was opened."""

    def __init__(self, use_tqdm: UseTqdm, total: int) -> None:
        make = use_tqdm if callable(use_tqdm) else tqdm
        self._num_input = self._num_output = 0
        self._bar: Any = None  # tqdm's classes for terminals and notebooks have no common type
        if use_tqdm:
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0, 0, 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, num_prompt_tokens: int, num_output_tokens: int = 0) -> None:
        """Count one prompt and its outputs."""
        if self._bar is None:
            return
        self._num_input += num_prompt_tokens
        self._num_output += num_output_tokens
        elapsed = max(self._bar.format_dict["elapsed"], 1e-6)
        self._bar.postfix = _speed(self._num_input, self._num_output, elapsed)
        self._bar.update()
        if self._bar.n == self._bar.total:
            self._bar.refresh()


def _speed(num_input: int, num_output: int, seconds: float) -> str:
    return f"est. speed input: {num_input / seconds:.2f} toks/s, output: {num_output / seconds:.2f} toks/s"
