"""Variables for a check of stores: the shell's, and the few that a manifest may set."""

import pytest

from finetune_cli.checks.store_access import environment_of

SHELL = {
    "AWS_SECRET_ACCESS_KEY": "shell",
    "AWS_WEB_IDENTITY_TOKEN_FILE": "/shell",
    "AWS_REGION": "shell",
    "AZURE_STORAGE_ACCOUNT_KEY": "shell",
    "AZURE_FEDERATED_TOKEN_FILE": "/shell",
    "DOCKER_AUTH_CONFIG": "shell",
    "DOCKER_CONFIG": "/shell",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "shell",
    "HF_TOKEN": "shell",
    "PYTHONPATH": "shell",
}


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "name",
    [
        "PYTHONPATH",
        "LD_PRELOAD",
        "PATH",
        "HTTPS_PROXY",
        "SSL_CERT_FILE",
        "HF_HOME",
        "HF_TOKEN_PATH",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_METADATA_ENDPOINT",
        "AZURE_AUTHORITY_HOST",
        "AZURE_USE_AZURE_CLI",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "DOCKER_CONFIG",
    ],
)
def test_variable_of_a_file_or_a_program_is_not_taken(name):
    assert environment_of({name: "/manifest"}) == environment_of({})


@pytest.mark.parametrize(
    "name", ["AWS_REGION", "AWS_DEFAULT_REGION", "AZURE_STORAGE_ACCOUNT_NAME"]
)
def test_part_of_a_host_name_is_taken_if_it_is_plain(name):
    assert environment_of({name: "eu-west-1"})[0][name] == "eu-west-1"
    assert environment_of({name: "x@evil.test/"}) == environment_of({})


@pytest.mark.parametrize(
    ("endpoint", "scheme", "dropped", "anonymous"),
    [
        ("HF_ENDPOINT", "hf", ["HF_TOKEN"], "HF_TOKEN_PATH"),
        (
            "AWS_ENDPOINT_URL",
            "s3",
            ["AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE"],
            "AWS_SKIP_SIGNATURE",
        ),
        ("AWS_ENDPOINT_URL_S3", "s3", ["AWS_SECRET_ACCESS_KEY"], "AWS_SKIP_SIGNATURE"),
        (
            "AZURE_ENDPOINT",
            "az",
            ["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_FEDERATED_TOKEN_FILE"],
            "AZURE_SKIP_SIGNATURE",
        ),
        (
            "STORAGE_EMULATOR_HOST",
            "gs",
            ["GOOGLE_SERVICE_ACCOUNT_KEY"],
            "STORAGE_EMULATOR_HOST",
        ),
        (
            "FINETUNE_INSECURE_REGISTRIES",
            "oci",
            ["DOCKER_AUTH_CONFIG"],
            "DOCKER_CONFIG",
        ),
    ],
)
def test_server_of_a_manifest_gets_no_credentials(endpoint, scheme, dropped, anonymous):
    environment, withheld = environment_of({endpoint: "http://evil.test"})
    assert withheld == {scheme: endpoint}
    assert [name for name in dropped if name in environment] == []
    assert environment[anonymous] not in {None, "/shell"}
    assert (environment[endpoint], environment["AWS_REGION"]) == (
        "http://evil.test",
        "shell",
    )
    others = {
        name: value for name, value in SHELL.items() if name[:3] != dropped[0][:3]
    }
    assert environment | others == environment


def test_server_of_a_manifest_gets_the_manifests_credentials():
    given = {
        "AWS_ENDPOINT_URL": "http://mine.test",
        "AWS_SECRET_ACCESS_KEY": "mine",
        "AWS_ACCESS_KEY_ID": "me",
    }
    environment, withheld = environment_of(given)
    assert withheld == {}
    assert {
        name: value for name, value in environment.items() if name.startswith("AWS_")
    } == {
        **given,
        "AWS_REGION": "shell",
    }


def test_server_that_the_shell_names_too_gets_its_credentials(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.test")
    environment, withheld = environment_of({"HF_ENDPOINT": "http://mirror.test"})
    assert environment["HF_TOKEN"] == "shell"
    assert withheld == {}
