import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from e2e.gitops.application import Application, install
from e2e.gitops.argo_cd import ArgoCD, running_argo_cd
from e2e.pipelines import chart
from testcluster import fixtures
from testcluster.images import image_layers, oci
from testcluster.kube_namespace import KubeNamespace, temporary_namespace
from testcluster.provider import Provider


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Provider]:
    """A cluster of one node with the operator's image, which no other test file uses."""
    with fixtures.cluster(
        "gitops", "ondemand", images=("finetune-operator:dev",)
    ) as created:
        yield created


@pytest.fixture(scope="module")
def argo_cd(
    own_cluster: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ArgoCD]:
    with running_argo_cd(
        own_cluster.kube, tmp_path_factory.mktemp("argo-cd")
    ) as running:
        yield running


@pytest.fixture(scope="module")
def operator(argo_cd: ArgoCD) -> Application:
    """The Application of the chart; every pipeline here is reconciled by what it installs."""
    repository = argo_cd.git.create("charts")
    shutil.copytree(chart.CHART, repository.folder / "charts" / chart.CHART.name)
    repository.commit({})
    application = Application(
        argo_cd, KubeNamespace(argo_cd.kube, chart.NAMESPACE), repository
    )
    install(application, replicaCount=1)
    application.wait("Synced", "Healthy", 300)
    return application


@pytest.fixture
def kubectl_image(own_cluster: Provider) -> str:
    """The name of an image with the cluster's own kubectl, in its registry."""
    layer = image_layers.layer({"bin/kubectl": own_cluster.kube.kubectl})
    config = image_layers.config([layer], ["/bin/kubectl"])
    return oci.push(own_cluster.registry, "tools/kubectl", "1", config, [layer])


@pytest.fixture
def new_application(
    argo_cd: ArgoCD, operator: Application, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Application]]:
    """Return a new namespace with a repository for it; the caller creates the Application."""
    with ExitStack() as stack:

        def create(purpose: str = "") -> Application:
            name = fixtures.namespace_name(request.node.name + purpose)
            namespace = stack.enter_context(temporary_namespace(argo_cd.kube, name))
            created = Application(argo_cd, namespace, argo_cd.git.create(name))
            stack.callback(created.delete)
            return created

        yield create


@pytest.fixture
def application(new_application: Callable[[], Application]) -> Application:
    """A new namespace with a repository for it; the test creates the Application."""
    return new_application()
