"""Certificates of servers that the client trusts, and what a failure of TLS says."""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import certifi
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from index.errors import InvalidArgument
from regraft import connection
from regraft.client import Client, Unreachable


def test_certificates_are_read_once_for_all_clients(monkeypatch):
    Client("https://nowhere").close()
    monkeypatch.setattr("ssl.create_default_context", lambda **_: pytest.fail("read again"))

    Client("https://nowhere").close()


def test_certificates_are_those_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    read = connection.certificates.__wrapped__  # what other tests of this process trust stays
    assert len(read().get_ca_certs()) > 1
    own, end = tmp_path / "own.pem", "-----END CERTIFICATE-----\n"
    own.write_text(Path(certifi.where()).read_text().partition(end)[0] + end)

    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    assert len(read().get_ca_certs()) == 1
    for broken in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").touch()
        monkeypatch.setenv("SSL_CERT_FILE", str(broken))
        with pytest.raises(InvalidArgument, match=rf"SSL_CERT_FILE=.*{broken.name} cannot be read"):
            read()


def test_certificates_are_not_read_for_plain_http(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "certificates", connection.certificates.__wrapped__)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))

    Client("http://127.0.0.1:8080").close()
    with pytest.raises(InvalidArgument, match=r"SSL_CERT_FILE=.*missing.pem"):
        Client("HTTPS://nowhere")


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_failure_of_tls_says_what_may_help(tmp_path, encrypted):
    """The certificate is of no authority that the client trusts; or the server speaks no TLS."""
    if encrypted:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self_signed(tmp_path / "server.pem"))

    def answer() -> None:
        accepted, _ = listener.accept()
        with accepted, suppress(OSError):
            if encrypted:
                context.wrap_socket(accepted, server_side=True)
            else:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                accepted.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        answered = threads.submit(answer)
        hint = "set SSL_CERT_FILE" if encrypted else "http:// instead of https://"
        with Client(f"https://127.0.0.1:{listener.getsockname()[1]}") as client:
            with pytest.raises(Unreachable, match=hint) as raised:
                client.create_gallery("g")
            answered.result()
    assert "regraft serve" not in str(raised.value)


def self_signed(path: Path) -> Path:
    """A file with a new key and a certificate that it signed itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(1))
    parts = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), made.sign(key, SHA256())
    path.write_bytes(parts[0] + parts[1].public_bytes(Encoding.PEM))
    return path
