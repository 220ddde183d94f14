"""Checks of a model and a machine before an engine loads anything: seconds before torch is imported, and minutes before
weights are read.

`check_start` is the only entrance; it raises ValueError with one sentence that names the file or the option. What a
check decides is decided in one place: the worker, which knows more later, calls the same functions.
"""

from proa_engine.preflight.check import check_start

__all__ = ["check_start"]
