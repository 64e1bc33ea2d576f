"""Certificates that are pinned: made once by whoever listens, known by their SHA-256 to whoever dials.

Nobody signs them and no name is checked: the one who dials trusts exactly the certificate whose pin came with the
token. Their dates say nothing either, so that a machine whose clock is off can still be told so.
"""

import contextlib
import datetime
import hashlib
import hmac
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path

from racimo.agent.protocol import LINK_ALPN
from racimo.agent.whole_file import write_whole
from racimo.spec.config import parse_address
from racimo.spec.errors import RacimoError
from racimo.spec.home import Home

VALID_YEARS = 10
FETCH_TIMEOUT_S = 5.0
HTTP_ALPN = "http/1.1"


def make_certificate(names: Iterable[str]) -> tuple[bytes, bytes]:
    """A self-signed certificate (EC P-256) for these host names and IP addresses, and its private key; both PEM."""
    # 0.1 s of imports that only this function needs.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "racimo")])
    years = datetime.timedelta(days=365 * VALID_YEARS)
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            with contextlib.suppress(ValueError):  # a host name beyond ASCII: nothing checks it
                alternatives.append(x509.DNSName(name))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - years)
        .not_valid_after(now + years)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, private


def ensure_certificate(certificate: Path, key: Path, names: Iterable[str]) -> bytes:
    """The PEM in `certificate`, made now with its `key` (both 0600) unless both are there. `OSError`."""
    if certificate.exists() and key.exists():
        return certificate.read_bytes()
    pem, private = make_certificate(names)
    for path, content in ((key, private), (certificate, pem)):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, content)
    return pem


def ensure_head_certificate(home: Home, bind: str) -> bytes:
    """The cluster's certificate at the head, PEM. `bind`: `IP:PORT` at which others reach it. `OSError`."""
    names = (parse_address(bind)[0], "127.0.0.1", "localhost", socket.gethostname())
    return ensure_certificate(home.certificate_file, home.certificate_key_file, names)


def pin_of(pem: bytes) -> str:
    """SHA-256 (hex) of a certificate in PEM. `RacimoError` certificate-mismatch if it is none."""
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode())).hexdigest()
    except ValueError as error:
        raise RacimoError("certificate-mismatch", f"this is no certificate: {error}") from error


def server_context(certificate: Path, key: Path, alpn: tuple[str, ...] = (LINK_ALPN, HTTP_ALPN)) -> ssl.SSLContext:
    """For whoever listens: TLS 1.3 with that certificate. `OSError`, `ssl.SSLError` for files that do not fit."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(list(alpn))
    context.num_tickets = 0  # links live for days; a resumed handshake would save little
    return context


def client_context(pem: bytes, alpn: tuple[str, ...] = ()) -> ssl.SSLContext:
    """For whoever dials: trusts exactly this certificate, whatever name or address it is met at."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=pem.decode())
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def fetch_certificate(address: str, pin: str, timeout_s: float = FETCH_TIMEOUT_S) -> bytes:
    """The certificate shown at `IP:PORT`, as PEM, if it is the pinned one.

    `RacimoError`: `unreachable` with what was tried, `certificate-mismatch`.
    """
    host, port = parse_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # compared with the pin below instead
    connected = False
    try:
        with socket.create_connection((host, port), timeout_s) as plain:
            connected = True
            with context.wrap_socket(plain, server_hostname=None) as wrapped:
                shown = wrapped.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        message = f"{address} answers, but not with TLS: {error.reason or error}"
        raise RacimoError("unreachable", message, "racimo up   # on the head shows its address") from error
    except OSError as error:
        raise _unreachable(address, error, timeout_s, connected=connected) from error
    if not hmac.compare_digest(hashlib.sha256(shown).hexdigest(), pin):
        message = f"{address} shows another certificate than the token names: it is another cluster, or was set up anew"
        raise RacimoError("certificate-mismatch", message, "racimo up   # on the head shows the line to paste")
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _unreachable(address: str, error: OSError, timeout_s: float, *, connected: bool) -> RacimoError:
    """In the words of how far it came: no address for the name, no connection, or one on which nothing was said."""
    host, port = parse_address(address)
    if isinstance(error, socket.gaierror):
        message = f"{host} has no address here: {error.strerror}"
        return RacimoError("unreachable", message, f"getent hosts {host}   # or give the head's IP")
    if connected:
        what = "says nothing" if isinstance(error, TimeoutError) else "hangs up"
        message = f"something takes connections at {address} but {what} (waited up to {timeout_s:g} s)"
        return RacimoError(
            "unreachable", message, "racimo up   # on the head shows its address, racimo check its state"
        )
    why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno) if error.errno else error
    message = f"no cluster answers at {address} ({why}; waited up to {timeout_s:g} s)"
    return RacimoError("unreachable", message, f"nc -vz {host} {port}   # is the port open from here?")
