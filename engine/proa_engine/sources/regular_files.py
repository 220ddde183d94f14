"""Checks of a file before it is read. Raises ValueError with a sentence for the user."""

import stat
from pathlib import Path

_LFS_POINTER = b"version https://git-lfs"


def check_regular(path: Path) -> None:
    """Raise ValueError for a folder, a device or a pipe: opening or reading those could block, or never end. Raises
    OSError if there is no such file."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"{path} is a folder, not a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is a device, a pipe or a socket, not a file")


def refuse_lfs_pointer(path: Path, beginning: bytes | bytearray) -> None:
    """`beginning`: the file's first bytes."""
    if beginning.startswith(_LFS_POINTER):
        raise ValueError(f"{path} is a pointer of Git LFS, not the file itself; get the files with `git lfs pull`")


def refuse_broken_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"{path} is a link to {path.readlink()}, which does not exist; of a model in the hub's cache, give the id, "
            "or copy or mount its folder models--… whole"
        )
