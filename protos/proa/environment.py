"""Environment variables that set flags: `PROA_MAX_MODEL_LEN` is `--max-model-len`.

`options.from_arguments` reads them for the flags that the command line does not have. Here are their names, the forms
of their values, and which variables are not meant for flags: Kubernetes adds `PROA_PORT=tcp://10.0.0.1:80` and others
to the pods beside a Service named proa, unless a pod has `enableServiceLinks: false`.
"""

import difflib
import json
import re
from collections.abc import Collection, Mapping

HELP = (
    "A flag that is not given is read from an environment variable: PROA_MAX_MODEL_LEN is --max-model-len. Switches "
    "are 1, 0, true or false. A flag that can be repeated has its values with commas between them, or as a JSON array; "
    "the variable of a key has one, or a JSON array. An empty variable counts as not set."
)
PREFIX = "PROA_"
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")
_OF_SERVICE = re.compile(r".*_SERVICE_(?:HOST|PORT)(?:_.*)?")  # no flag is called so
_LIKENESS = 0.8  # of a name that is probably misspelled, as a ratio of `difflib`
_SWITCHES = {"1": True, "true": True, "0": False, "false": False}


def variable_of(flag: str) -> str:
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def value_of(variable: str, environment: Mapping[str, str]) -> str | None:
    """The variable's text, None if it is not set, empty, or Kubernetes' address of a Service."""
    text = environment.get(variable)
    return None if not text or _is_service_address(variable, text) else text


def split(text: str) -> list[str]:
    """The values of a flag that can be repeated: a JSON array, whose objects stay JSON; a JSON object, which is one
    value; or texts with commas between them. Raises `ValueError`."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return [each.strip() for each in text.split(",") if each.strip()]
    try:
        values = json.loads(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a JSON array") from None
    values = values if isinstance(values, list) else [values]
    return [each if isinstance(each, str) else json.dumps(each) for each in values]


def read_switch(text: str) -> bool:
    """Raises `ValueError`."""
    try:
        return _SWITCHES[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be 1, 0, true or false, got {text!r}") from None


def warnings(known: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return a sentence for each variable that is probably meant for a flag and sets none, by its name. `known`: the
    variables of all flags."""
    result = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or not text or _OF_SERVICE.fullmatch(name):
            continue
        is_address = _is_service_address(name, text)
        if name in known and is_address:
            result[name] = f"{name} is ignored: {text} is the address of a Kubernetes Service"
        elif name not in known and not is_address and (close := _close(name, known)):
            result[name] = f"{name} is ignored: no flag has this variable; did you mean {close}?"
    return result


def _is_service_address(name: str, text: str) -> bool:
    return name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text) is not None


def _close(name: str, known: Collection[str]) -> str | None:
    names = [each.removeprefix(PREFIX) for each in known]
    close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=_LIKENESS)
    return PREFIX + close[0] if close else None
