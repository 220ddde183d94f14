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

    Returns their folders. Slots of other users, which it may not delete, stay. `now` is in Unix seconds. Raises
    `OSError`.
    """
    deleted = []
    for folder in path.glob("*/*/"):
        is_slot = _FINGERPRINT.fullmatch(folder.parent.name) and folder.name.isdecimal() and (folder / _LOCK).is_file()
        if not is_slot:
            continue
        try:
            if _delete_abandoned(folder, now):
                deleted.append(folder)
        except (FileNotFoundError, PermissionError):  # the engine that has it deleted a file; another user's
            continue
    return deleted


def _delete_abandoned(folder: Path, now: float) -> bool:
    """Delete a slot if it is abandoned. Returns whether it was. Raises `OSError`."""
    if now - _last_change(folder) < _ABANDONED_SECONDS or (descriptor := lock_folder(folder)) is None:
        return False
    try:
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
    return True


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
