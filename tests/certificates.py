"""Certificates as PEM files, good ones and others."""

import datetime

import trustme


class Authority:
    """A certificate authority whose certificate is the file ``file``."""

    def __init__(self, folder, name="ca"):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name, self._ca = folder, name, trustme.CA()
        self.file = folder / f"{name}.crt"
        self.file.write_bytes(self._ca.cert_pem.bytes())

    def issue(self, common_name, *hosts, valid=("2000-01-01", "2038-01-01")):
        """The files of a certificate and of its key: ``{"cert": …, "key": …}``."""
        begin, end = map(datetime.datetime.fromisoformat, valid)
        leaf = self._ca.issue_cert(*hosts, common_name=common_name, not_before=begin, not_after=end)
        stem = f"{self._name}-{len(list(self._folder.iterdir()))}"
        cert, key = self._folder / f"{stem}.crt", self._folder / f"{stem}.key"
        cert.write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        return {"cert": cert, "key": key}


EXPIRED = ("2000-01-01", "2020-01-01")
NOT_YET = ("2037-01-01", "2038-01-01")
