"""The command lines of the control plane's programs, with and without options."""

import json
from pathlib import Path

import pytest

from testcluster import go_modules
from testcluster.linux_namespaces.certificates import Authority
from testcluster.linux_namespaces.control_plane import ControlPlane
from testcluster.provider import AUDIT_LOG, USUAL_CONTROL_PLANE, ControlPlaneOptions


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "machines" / "control-plane"
    (folder / "etc").mkdir(parents=True)
    return ControlPlane(
        "lab", "10.89.0.2", folder, tmp_path / "bin", Authority(tmp_path / "pki")
    )


def flags(
    cluster: ControlPlane, program: str, options: ControlPlaneOptions
) -> dict[str, str]:
    """The flags that the program obeys: the last of each name."""
    services = cluster.services(Path("/dns"), Path("/registry"), options)
    argv = next(service.argv for service in services if service.name == program)
    return dict(word.removeprefix("--").split("=", 1) for word in argv[1:])


def test_flags_replace_the_usual_ones_of_their_program(cluster):
    changed = ControlPlaneOptions(
        flags={
            "kube-controller-manager": {"kube-api-qps": 7, "concurrent-job-syncs": 50}
        }
    )
    usual = flags(cluster, "kube-controller-manager", USUAL_CONTROL_PLANE)
    assert usual["kube-api-qps"] == "500"
    expected = usual | {"kube-api-qps": "7", "concurrent-job-syncs": "50"}
    assert flags(cluster, "kube-controller-manager", changed) == expected
    assert flags(cluster, "kube-scheduler", changed) == flags(
        cluster, "kube-scheduler", USUAL_CONTROL_PLANE
    )


def programs(cluster: ControlPlane, options: ControlPlaneOptions) -> dict[str, str]:
    return {
        service.name: service.argv[0]
        for service in cluster.services(Path("/dns"), Path("/registry"), options)
    }


@pytest.mark.parametrize("kubernetes", go_modules.OLDER_KUBERNETES)
def test_older_kubernetes_replaces_its_three_programs_only(cluster, kubernetes):
    usual, older = (
        programs(cluster, options)
        for options in (USUAL_CONTROL_PLANE, ControlPlaneOptions(kubernetes=kubernetes))
    )
    changed = {name: Path(path) for name, path in older.items() if path != usual[name]}
    assert set(changed) == {
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
    }
    assert len({path.parent for path in changed.values()}) == 1
    for path in changed.values():
        assert path.name in go_modules.BINARIES
        assert go_modules.version(go_modules.BINARIES[path.name]).startswith(
            f"{kubernetes}."
        )


def test_audit_policy_is_written_and_logs_into_the_folder(cluster, tmp_path):
    rules = [{"level": "Metadata"}]
    api_server = flags(
        cluster, "kube-apiserver", ControlPlaneOptions(audit_policy={"rules": rules})
    )
    policy = json.loads(Path(api_server["audit-policy-file"]).read_text())
    assert (policy["kind"], policy["rules"]) == ("Policy", rules)
    assert api_server["audit-log-path"] == str(tmp_path / AUDIT_LOG)


def test_no_audit_log_without_policy(cluster):
    assert not [
        name
        for name in flags(cluster, "kube-apiserver", USUAL_CONTROL_PLANE)
        if name.startswith("audit")
    ]
