"""The names of the causal language models that `transformers` has, read from its source.

Importing the library's own table imports torch, and takes seconds.
"""

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_MODULE = "transformers.models.auto.modeling_auto"
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"  # model_type -> architecture, as `OrderedDict([("llama", "Llama…"), …])`


def has_transformers() -> bool:
    return find_spec("transformers") is not None


@cache
def causal_lm_names() -> frozenset[str]:
    """`transformers` must be installed. Of a version whose source has another form, the table is imported."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    if source.is_file() and (names := parse_names(source.read_text(encoding="utf-8"))):
        return names
    return frozenset(getattr(import_module(_MODULE), _TABLE).values())


def parse_names(source: str) -> frozenset[str]:
    """The architectures in the table of the module with this source; none if it has another form."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List() as table])) if name == _TABLE:
                return frozenset(architecture for _, architecture in ast.literal_eval(table))
    return frozenset()
