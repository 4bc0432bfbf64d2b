"""Certificates and kubeconfigs of a cluster, signed by a certificate authority that exists as long as the cluster."""

from __future__ import annotations

import base64
import ipaddress
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY = timedelta(days=365)
ADMINS = "system:masters"
"""The group that RBAC gives every right."""


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """The certificate authority of a cluster; its folder is readable by its owner only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.pair.certificate.exists():
            self._create()

    @property
    def pair(self) -> Pair:
        """Return the authority's own certificate and key."""
        return self._files("ca")

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(
            self.pair.key.read_bytes(), password=None
        )
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError(
                f"{self.pair.key} is not an elliptic curve key; delete the cluster and create it again"
            )
        return key

    def _files(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def _create(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("finetune-e2e")
        builder = _builder(name, name, key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        _write(
            self.pair,
            builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()),
            key,
        )

    def issue(
        self, name: str, subject: str, group: str = "", *, serves: tuple[str, ...] = ()
    ) -> Pair:
        """Issue a client certificate; with `serves`, also a server certificate for those names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        uses = [
            ExtendedKeyUsageOID.CLIENT_AUTH,
            *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else []),
        ]
        builder = _builder(_name(subject, group), authority.subject, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if serves:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(
                    [_alternative_name(host) for host in serves]
                ),
                critical=False,
            )
        pair = self._files(name)
        _write(pair, builder.sign(self._key, hashes.SHA256()), key)
        return pair

    def signing_key(self, name: str) -> Path:
        """Create a key without a certificate, which signs service account tokens."""
        path = self.folder / f"{name}.key"
        path.write_bytes(_pem(ec.generate_private_key(ec.SECP256R1())))
        return path

    def kubeconfig(self, path: Path, server: str, pair: Pair, cluster: str) -> Path:
        """Write a self-contained kubeconfig that is readable by its owner only."""

        def encoded(file: Path) -> str:
            return base64.b64encode(file.read_bytes()).decode()

        user = {
            "client-certificate-data": encoded(pair.certificate),
            "client-key-data": encoded(pair.key),
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": cluster,
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": encoded(self.pair.certificate),
                    },
                }
            ],
            "users": [{"name": cluster, "user": user}],
            "contexts": [
                {"name": cluster, "context": {"cluster": cluster, "user": cluster}}
            ],
            "current-context": cluster,
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))
        return path


def _name(subject: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, subject)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
    )
    # Valid from five minutes ago, for clocks that are slow.
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(
        now - timedelta(minutes=5)
    )
    return builder.not_valid_after(now + VALIDITY)


def _alternative_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _write(
    pair: Pair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(_pem(key))
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
