"""The cluster's certificates and kubeconfigs, made by one authority that lives as long as the cluster."""

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

YEARS = timedelta(days=365)
ADMINS = "system:masters"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs for one cluster; everything lies in one folder that only root reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.pair.certificate.exists():
            self._begin()

    @property
    def pair(self) -> Pair:
        """Give the authority's own certificate and key."""
        return self._files("ca")

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        key = serialization.load_pem_private_key(self.pair.key.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError(f"{self.pair.key} is not a key of ours")
        return key

    def _files(self, name: str) -> Pair:
        return Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def _begin(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("finetune-e2e")
        builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        signs = x509.KeyUsage(
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
        _write(self.pair, builder.add_extension(signs, critical=True).sign(key, hashes.SHA256()), key)

    def issue(self, name: str, subject: str, group: str = "", *, serves: tuple[str, ...] = ()) -> Pair:
        """Sign a certificate for a client, and for a server at the names and addresses given."""
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
        builder = _builder(_name(subject, group), authority.subject, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        if serves:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_place(one) for one in serves]), critical=False
            )
        pair = self._files(name)
        _write(pair, builder.sign(self._key, hashes.SHA256()), key)
        return pair

    def signing_key(self, name: str) -> Path:
        """Make a key without a certificate: the one that service account tokens are signed with."""
        path = self.folder / f"{name}.key"
        path.write_bytes(_pem(ec.generate_private_key(ec.SECP256R1())))
        return path

    def kubeconfig(self, path: Path, server: str, pair: Pair, cluster: str) -> Path:
        """Write a kubeconfig with everything in it, readable by its owner only."""

        def packed(file: Path) -> str:
            return base64.b64encode(file.read_bytes()).decode()

        user = {"client-certificate-data": packed(pair.certificate), "client-key-data": packed(pair.key)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": cluster,
                    "cluster": {"server": server, "certificate-authority-data": packed(self.pair.certificate)},
                }
            ],
            "users": [{"name": cluster, "user": user}],
            "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": cluster}}],
            "current-context": cluster,
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))
        return path


def _name(subject: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, subject)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    # Begun a little in the past, for clocks that are a little behind.
    begun = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(minutes=5))
    return begun.not_valid_after(now + YEARS)


def _place(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _write(pair: Pair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pair.key.touch(mode=0o600)
    pair.key.write_bytes(_pem(key))
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
