"""Server credentials for (mutual) TLS that reload their files when these change.

Only new connections use a new certificate.
"""

import grpc

from proa.tls import TlsIdentity, TlsSource


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """Credentials that are checked for new files at each connection. With an authority, clients must show a
    certificate that it signed."""
    used = source.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration, or `None` if unchanged. gRPC calls this on its own threads, one at a time."""
        nonlocal used
        identity = source.current()
        if identity is used:
            return None
        used = identity
        return _configuration(identity)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,  # type: ignore[arg-type]  # the stub does not allow None
        require_client_authentication=used.authority is not None,
    )


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.authority
    )
