"""URIs of data on web servers: what is accepted, and what messages and model cards show of them."""

import pytest
from pydantic import TypeAdapter, ValidationError
from support.trainer.pushes import push_config, push_environment

from finetune_trainer.contract import DatasetSource
from finetune_trainer.contract.uris import DataUri, without_secrets
from finetune_trainer.publishing.model_card import card

SIGNED = "https://user:PASSWORD@host/rows.jsonl?X-Amz-Signature=5e5516"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (SIGNED, "https://host/rows.jsonl"),
        ("http://host:80/a%20b?x#y", "http://host:80/a%20b"),
        ("http://user@host/a@b", "http://host/a@b"),
        (
            f"{SIGNED} and {SIGNED}: lost",
            "https://host/rows.jsonl and https://host/rows.jsonl: lost",
        ),
        (
            "Max retries exceeded with url: /v2/a?_state=5e5516 (refused)",
            "Max retries exceeded with url: /v2/a (refused)",
        ),
        ("s3://bucket/rows-?.jsonl", "s3://bucket/rows-?.jsonl"),
        ("hf://org/name@main/rows-?.jsonl", "hf://org/name@main/rows-?.jsonl"),
        ("oci://host/name@sha256:1", "oci://host/name@sha256:1"),
    ],
)
def test_secrets_of_web_addresses_are_not_shown(text, shown):
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    "uri",
    [
        "https://user:PASSWORD@host/rows.jsonl",
        "http://user@host/a",
        "https://u:p?x@host/a",
        "https://u#@host/a",
    ],
)
def test_user_name_in_a_web_address_is_refused(uri):
    with pytest.raises(ValidationError, match="string_pattern_mismatch"):
        TypeAdapter(DataUri).validate_python(uri)


@pytest.mark.parametrize(
    "uri",
    ["https://host/a@b/rows.jsonl?x=y@z", "http://host:80/rows.jsonl?signature=5e5516"],
)
def test_query_and_at_sign_in_a_path_are_accepted(uri):
    assert TypeAdapter(DataUri).validate_python(uri) == uri


def test_signature_is_not_in_the_model_card(tmp_path, tiny_model):
    source = DatasetSource(uri=SIGNED.replace("user:PASSWORD@", ""), revision="v1")
    config = push_config(tiny_model, datasets=(source,))
    text = card(config, push_environment(tmp_path, tiny_model), "Adapter")
    assert "| Data set | `https://host/rows.jsonl` at `v1` |" in text
    assert "5e5516" not in text
