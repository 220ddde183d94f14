"""The server's side of mutual TLS: credentials that follow their files, so that nothing restarts for a new certificate.

Streams that run keep the certificates they began with.
"""

import grpc

from proa.tls import TlsIdentity, TlsSource


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """gRPC asks for them at each new connection. Clients must show a certificate where an authority is named."""
    used = source.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """On gRPC's own threads, one at a time; `None`: no change."""
        nonlocal used
        identity = source.current()
        if identity is used:
            return None
        used = identity
        return _configuration(identity)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,  # type: ignore[arg-type]  # the stub knows of no None
        require_client_authentication=used.authority is not None,
    )


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.authority
    )
