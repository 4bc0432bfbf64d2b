"""Mistakes in the environment of object stores: which error they are, and what it says."""

import http.server
import threading

import pytest

from finetune_trainer.runtime.errors import ConfigInvalid, CredentialsRejected
from finetune_trainer.stores.objects import bucket
from finetune_trainer.stores.objects.store import ObjectSource

S3 = {
    "AWS_ACCESS_KEY_ID": "AKIA5e5516",
    "AWS_SECRET_ACCESS_KEY": "5e5516",
    "AWS_REGION": "us-east-1",
}


class Redirect(http.server.BaseHTTPRequestHandler):
    """Answers as S3 does for a bucket of another region."""

    def do_GET(self) -> None:
        self.send_response(301)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def s3(monkeypatch):
    """Credentials of S3 in the environment, and the address of a server that redirects without an address."""
    monkeypatch.setattr(bucket, "RETRY_SECONDS", 1.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            **S3,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        }.items():
            monkeypatch.setenv(name, value)
        yield
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ],
)
@pytest.mark.parametrize(
    "value", ["5e5516\n", "5e5516\r", "5e5\n516", " 5e5516", "5e5516é"]
)
def test_key_with_a_line_break_is_refused_by_name(s3, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(CredentialsRejected, match=f"{name} has a line break") as error:
        ObjectSource("s3://bucket/rows/*.jsonl").list_files(None)
    assert "5e5" not in str(error.value)


def test_bucket_of_another_region_is_a_mistake_in_the_manifest(s3):
    with pytest.raises(
        ConfigInvalid, match="set AWS_REGION to the region of the bucket"
    ):
        ObjectSource("s3://bucket/rows/*.jsonl").list_files(None)


def test_azure_key_that_is_not_base64_is_refused(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "this is 5e5516!")
    with pytest.raises(
        CredentialsRejected,
        match="check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ) as error:
        ObjectSource("az://container/rows/*.jsonl")
    assert "5e5" not in str(error.value)


@pytest.mark.parametrize(
    "key", ['"5e5516"', "[1]", "null", "{}", '{"private_key": 1}', "5e5516"]
)
def test_google_key_that_is_no_key_is_refused(monkeypatch, key):
    pytest.importorskip("google.cloud.storage")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", key)
    with pytest.raises(
        CredentialsRejected,
        match="GOOGLE_SERVICE_ACCOUNT_KEY is not the JSON of a service",
    ) as error:
        ObjectSource("gs://bucket/rows/*.jsonl")
    assert "5e5" not in str(error.value)
