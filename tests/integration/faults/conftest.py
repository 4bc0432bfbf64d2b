from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults.operators import OperatorForks
from support.operator.operator_process import install_crd

from testcluster.provider import Provider


@pytest.fixture(scope="session")
def forks() -> Iterator[OperatorForks]:
    """Operators that start in milliseconds."""
    created = OperatorForks()
    yield created
    created.close()


@pytest.fixture(scope="package")
def kubeconfig(control_plane: Provider) -> Path:
    """The administrator's kubeconfig of a cluster that has the CRD."""
    install_crd(control_plane.kube)
    return control_plane.kube.kubeconfig
