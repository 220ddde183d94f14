"""Slots: which folder of a volume an engine's disk cache is in.

`PATH/FINGERPRINT/SLOT/rank-R`: engines of one model that share a volume each have a slot, which they hold by a lock on
a file. An engine that starts takes the first slot that is free, and so the blocks of one that has ended.
"""

import fcntl
import os
import re
import shutil
from itertools import count
from pathlib import Path

_FINGERPRINT_BYTES = 16
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_LOCK = "lock"
_ABANDONED_SECONDS = 7 * 86400.0


def lock_folder(folder: Path) -> int | None:
    """Lock a folder, which is made if need be, while the returned descriptor is open in any process. None: another
    process has locked it. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _LOCK
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # otherwise it was deleted meanwhile
            os.utime(descriptor)
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def take_slot(path: Path, fingerprint: bytes) -> tuple[Path, int]:
    """Lock the first slot that no other engine has. Returns its folder and the lock's descriptor. Raises `OSError`."""
    for number in count():
        folder = path / fingerprint[:_FINGERPRINT_BYTES].hex() / str(number)
        if (descriptor := lock_folder(folder)) is not None:
            return folder, descriptor
    raise AssertionError


def delete_abandoned(path: Path, now: float) -> list[Path]:
    """Delete slots that no engine has used for a week: of a model that was replaced, or of replicas that are gone.

    Returns their folders. `now` is in Unix seconds. Raises `OSError`.
    """
    deleted = []
    for folder in path.glob("*/*/"):
        is_slot = _FINGERPRINT.fullmatch(folder.parent.name) and folder.name.isdecimal() and (folder / _LOCK).is_file()
        if not is_slot:
            continue
        try:
            is_abandoned = now - _last_change(folder) >= _ABANDONED_SECONDS
        except FileNotFoundError:  # the engine that has it deleted a file
            continue
        if is_abandoned and (descriptor := lock_folder(folder)) is not None:
            shutil.rmtree(folder)
            os.close(descriptor)
            deleted.append(folder)
    return deleted


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
