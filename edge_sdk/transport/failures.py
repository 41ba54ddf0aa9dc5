"""Why there is no connection, in a sentence with the fix."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from dataclasses import dataclass

from edge_sdk.transport import tls
from edge_sdk.transport.connection import Account, RefusedConnection
from edge_sdk.transport.events import Disconnected

logger = logging.getLogger(__name__)

FINAL = {133, 134, 135, 138, 140, 144}
"""Reason codes of a CONNACK that neither time nor another version cures: bad client id, bad login, not
authorised, banned, bad authentication, bad topic of the will."""
_LOGIN = {134, 135}
_PROBE = 3.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no connection.

    Attributes:
        sentence: to who has asked for one.
        event: to who has had one.
    """

    sentence: str
    event: Disconnected


def failure_of(error: Exception, account: Account, deadline: float) -> Failure:
    """What an attempt to connect has come to; it may shake hands once more, until ``deadline``."""
    if isinstance(error, RefusedConnection):
        # Where the broker refuses our certificate, it hangs up in place of a CONNACK.
        fault = _probe(account, deadline) if error.hung_up else None
        return _refused(error, account) if fault is None else _untrusted(fault, account)
    if isinstance(error, OSError | ValueError):
        fault = tls.fault_of(error) if isinstance(error, ssl.SSLError) else None
        return _unreachable(error, account) if fault is None else _untrusted(fault, account)
    logger.error("an attempt to connect has failed", exc_info=error)
    reason = f"{type(error).__name__} in this program: {error}"
    return Failure(reason, Disconnected(reason))


def _refused(error: RefusedConnection, account: Account) -> Failure:
    hint = ""
    if error.code in _LOGIN:
        hint = f": {_login_hint(account)}"
    elif error.hung_up and account.context is None:
        hint = "; is this its port for TLS, mqtts://?"
    reason = f"{error}{hint}"
    return Failure(
        f"{_broker(account)} refuses the connection: {reason}",
        Disconnected(reason, fatal=error.code in FINAL),
    )


def _unreachable(error: Exception, account: Account) -> Failure:
    there = not isinstance(error, ConnectionRefusedError | socket.gaierror)
    hint = ", and is this its port for TLS?" if account.context is not None and there else "?"
    reason = f"no broker at {account.host}:{account.port} ({error}); is it running{hint}"
    return Failure(reason, Disconnected(reason))


def _untrusted(fault: tls.Fault, account: Account) -> Failure:
    if fault.ours:
        sentence = f"{_broker(account)} refuses the connection: {fault.reason}"
        return Failure(sentence, Disconnected(fault.reason, fatal=True))
    # The broker's own fault may be mended there.
    sentence = f"{_broker(account)} cannot be trusted: {fault.reason}"
    return Failure(sentence, Disconnected(sentence))


def _login_hint(account: Account) -> str:
    if account.username is not None:
        return f"check user {account.username!r} and the password (--username, --password-file)"
    if account.certified:
        return "it takes no user of the common name in --cert, or wants a login too"
    return "it wants a login: give --username and --password-file"


def _probe(account: Account, deadline: float) -> tls.Fault | None:
    if account.context is None:
        return None
    timeout = max(min(deadline - time.monotonic(), _PROBE), 1.0)
    return tls.probe(account.context, account.host, account.port, timeout=timeout)


def _broker(account: Account) -> str:
    return f"the broker at {account.host}:{account.port}"
