"""Certificates of servers that the client trusts, and what a failure of TLS says."""

from __future__ import annotations

import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
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


@pytest.mark.parametrize(
    ("trusted", "names", "hint"),
    [
        ("", "127.0.0.1", "set SSL_CERT_FILE"),
        ("server", "127.0.0.2", "use the name or address that the certificate has"),
        ("authority", "127.0.0.1", "Python 3.13 and later demand these extensions"),
        ("", "", "http:// instead of https://"),
    ],
)
def test_a_failure_of_tls_says_what_may_help(tmp_path, monkeypatch, trusted, names, hint):
    """The certificate is not trusted, of another address, or of an authority without key usage; or it is no TLS."""
    if names:
        issue(tmp_path, names)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.pem")
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / f"{trusted}.pem"))
        trust = connection.certificates.__wrapped__()  # what other tests of this process trust stays
        trust.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN  # the default since Python 3.13
        monkeypatch.setattr(connection, "certificates", lambda: trust)

    def answer() -> None:
        accepted, _ = listener.accept()
        with accepted, suppress(OSError):
            if names:
                context.wrap_socket(accepted, server_side=True)
            else:
                accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                accepted.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        answered = threads.submit(answer)
        with Client(f"https://127.0.0.1:{listener.getsockname()[1]}") as client:
            with pytest.raises(Unreachable, match=re.escape(hint)) as raised:
                client.create_gallery("g")
            answered.result()
    assert "regraft serve" not in str(raised.value)


def issue(folder: Path, address: str) -> None:
    """Write authority.pem as `openssl req -x509` makes it, without key usage, and server.pem, a key and certificate."""
    now = datetime.now(UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("authority", "server")]
    authority, server = (
        x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number(), now, now + timedelta(1))
        for name, key in zip(names, keys, strict=True)
    )
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    server = server.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), critical=False)
    of_authority, of_server = (made.sign(keys[0], SHA256()).public_bytes(Encoding.PEM) for made in (authority, server))
    (folder / "authority.pem").write_bytes(of_authority)
    key = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.pem").write_bytes(key + of_server)
