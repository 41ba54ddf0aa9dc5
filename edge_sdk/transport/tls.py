"""TLS to a broker: the context, and the cause in a sentence where a handshake fails."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.errors import BrokerError

# OpenSSL's verdicts on a certificate (x509_vfy.h): ssl has no names for them.
_OF_THE_BROKER = {
    9: "is not valid yet: set this machine's clock, or renew the certificate there",
    10: "has expired: renew it there, or set this machine's clock if that is ahead",
    **dict.fromkeys((18, 19, 20, 21), "is of an unknown authority: give the one that has signed it (--ca)"),
    **dict.fromkeys((62, 64), "is for another host: write a name that is in the certificate into the URL"),
}
# Parts of OpenSSL's names for the alerts by which a broker refuses ours.
_OF_THIS_PEER = {
    "BAD_CERTIFICATE": "the certificate of this peer (--cert) is bad, or not valid yet by the "
    "broker's clock: check both",
    "CERTIFICATE_REQUIRED": "it wants a certificate and was given none of use: give --cert and --key",
    "CERTIFICATE_EXPIRED": "the certificate of this peer (--cert) has expired: have a new one issued",
    "CERTIFICATE_REVOKED": "the certificate of this peer (--cert) is revoked: have a new one issued",
    "HANDSHAKE_FAILURE": "it wants a certificate (give --cert and --key), or shares no cipher with us",
    "UNKNOWN_CA": "the certificate of this peer (--cert) is of an authority that the broker does not know: "
    "have one issued by the broker's",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no TLS with a broker.

    Attributes:
        reason: cause and fix.
        ours: the broker refuses this peer; else it is the broker that cannot be trusted.
    """

    reason: str
    ours: bool


def make_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """A context that trusts ``ca`` (the system's authorities by default) and shows ``cert``.

    Raises:
        BrokerError: a file cannot be used; says which.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise BrokerError(f"{ca} is no certificate authority in PEM ({_short(error)}): check --ca") from None
    if cert is None:
        if key is not None:
            raise BrokerError(f"{key} is a key without its certificate: give --cert too")
        return context
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except OSError as error:
        raise BrokerError(
            f"{cert} and its key cannot be used ({_short(error)}): check --cert and --key, both in PEM"
        ) from None
    return context


def fault_of(error: ssl.SSLError) -> Fault | None:
    """What a failed handshake says of the certificates; None if it failed for another reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        cause = _OF_THE_BROKER.get(
            error.verify_code, f"is not accepted here ({error.verify_message}): replace it"
        )
        return Fault(f"its certificate {cause}", ours=False)
    alert = (error.reason or "").partition("ALERT_")[2]
    if not alert:
        return None
    other = f"it ends the handshake ({alert.lower().replace('_', ' ')}): check --cert, and the broker's log"
    return Fault(next((text for name, text in _OF_THIS_PEER.items() if name in alert), other), ours=True)


def probe(context: ssl.SSLContext, host: str, port: int, *, timeout: float) -> Fault | None:
    """Shake hands once more, to hear of a fault; None if there is none, or no connection.

    With TLS 1.3 a broker looks at our certificate when the handshake is over for us, and its alert may be
    lost on a connection that we have written to already.
    """
    try:
        with (
            socket.create_connection((host, port), timeout) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            connection.recv(1)
    except ssl.SSLError as error:
        return fault_of(error)
    except (OSError, ValueError):
        return None
    return None


def _no_passphrase() -> str:
    raise BrokerError("the key of --key is encrypted, and nobody is there to type its passphrase: decrypt it")


def _short(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)
