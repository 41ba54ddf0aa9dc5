"""A mosquitto configuration for one fleet: logins, and an ACL by user name.

A device may write only ``up/<its user name>/+`` and read only ``down/<its user name>/+``, ``all/+`` and the
model. The check is by user name or certificate name (``%u``), never by client id, which anyone can claim.
Each pattern has as many levels as the topics have: under ``#`` a user ``one/join`` could join as ``one``.
"""

from __future__ import annotations

from pathlib import Path

from edge_sdk.errors import EdgeError
from edge_sdk.files import write_atomically
from edge_sdk.protocol import Topics

SERVER = "server"
"""The user name, or the certificate's common name, of the server."""


def write_broker_config(out: Path, *, fleet: str, tls: bool, passwords: bool = False) -> list[Path]:
    """Write ``mosquitto.conf`` and ``acl`` into ``out``; returns the files.

    Args:
        out: made where it is missing; its absolute path enters the configuration.
        fleet: whose topics are opened.
        tls: listen on 8883, with the certificate ``broker.crt``; else on 1883, where passwords can be read on
            the way.
        passwords: take logins of the file ``passwords`` that ``mosquitto_passwd`` makes, as without TLS, and
            not the common names of certificates.

    Raises:
        ProtocolError: the fleet's name is not allowed.
        EdgeError: the files cannot be written, or the path of ``out`` cannot stand in a configuration.
    """
    base = Topics(fleet).base
    out = out.absolute()
    if not str(out).isprintable():
        raise EdgeError(f"{str(out)!r} would break lines in mosquitto.conf: choose another folder")
    acl = "\n".join(
        [
            f"user {SERVER}",
            f"topic readwrite {base}/#",
            "",
            f"pattern write {base}/up/%u/+",
            f"pattern read {base}/down/%u/+",
            f"pattern read {base}/all/+",
            f"pattern read {base}/model/+/+/+",
            "",
        ]
    )
    lines = ["per_listener_settings false", "persistence false", f"acl_file {out / 'acl'}"]
    lines += [f"listener {8883 if tls else 1883}", "allow_anonymous false"]
    if tls:
        lines += [f"certfile {out / 'broker.crt'}", f"keyfile {out / 'broker.key'}"]
    if passwords or not tls:
        lines += [f"password_file {out / 'passwords'}"]
    else:
        lines += [f"cafile {out / 'ca.crt'}", "require_certificate true", "use_identity_as_username true"]
    files = {"mosquitto.conf": "\n".join([*lines, ""]), "acl": acl}
    for name, text in files.items():
        write_atomically(out / name, text.encode())
    return [out / name for name in files]
