"""A folder that changes as a Secret in a pod does: one symbolic link is swapped, at once for all files."""

import os
from pathlib import Path

from proa.tls import TlsFiles
from support.certificates import Certificate


class MountedSecret:
    """Holds `tls.crt`, `tls.key` and `ca.crt` of the certificate that was put last."""

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
