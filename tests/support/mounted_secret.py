"""A folder that changes like a mounted Secret: swapping one symbolic link replaces all files at once."""

import os
from pathlib import Path

from proa.tls import TlsFiles
from support.certificates import Certificate


class MountedSecret:
    """`tls.crt`, `tls.key` and `ca.crt` of the certificate passed to the last `put`."""

    def __init__(self, folder: Path, certificate: Certificate) -> None:
        self._folder = folder
        self._generation = 0
        folder.mkdir()
        self.put(certificate)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(Path("..data") / name)

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(
            certificate=self._folder / "tls.crt", key=self._folder / "tls.key", authority=self._folder / "ca.crt"
        )

    @property
    def flags(self) -> list[str]:
        paths = self.files
        return [f"--tls-cert={paths.certificate}", f"--tls-key={paths.key}", f"--tls-ca={paths.authority}"]

    def put(self, certificate: Certificate) -> None:
        self._swap(
            {
                "tls.crt": certificate.certificate.read_bytes(),
                "tls.key": certificate.key.read_bytes(),
                "ca.crt": certificate.authority.read_bytes(),
            }
        )

    def put_garbage(self) -> None:
        self._swap(dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), b"garbage"))

    def _swap(self, files: dict[str, bytes]) -> None:
        self._generation += 1
        data = self._folder / f"..{self._generation}"
        data.mkdir()
        for name, content in files.items():
            (data / name).write_bytes(content)
        link = self._folder / "..data_tmp"
        link.symlink_to(data.name)
        os.replace(link, self._folder / "..data")
