import pytest
from support.cli_session import Terminal
from support.fake_api_server import kubeconfig, serving
from support.scenario import World


@pytest.fixture
def terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("finetune_cli.cluster.session.PATIENCE_SECONDS", 3)
    with serving() as (api, url):
        file = tmp_path / "kubeconfig"
        file.write_text(kubeconfig(url, here="team", plain=None))
        monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield Terminal(api, tmp_path, capsys)


@pytest.fixture
def world(terminal):
    return terminal.api.add(World().settle())
