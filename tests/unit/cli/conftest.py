import pytest
from support.cli_session import CliSession
from support.fake_api_server import kubeconfig, serving
from support.scenario import Scenario


@pytest.fixture
def terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune_cli.cluster.session.API_RETRY_SECONDS", 3)
    with serving() as (api, url):
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig(url, here="team", plain=None))
        monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield CliSession(api, tmp_path, capsys)


@pytest.fixture
def scenario(terminal):
    return terminal.api.add(Scenario().reconcile_until_stable())
