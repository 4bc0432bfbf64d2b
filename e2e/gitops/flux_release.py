"""The HelmRelease of the chart, as the examples of Flux have it."""

from pathlib import Path
from typing import Any

import yaml

from e2e.gitops.flux import Flux
from e2e.pipelines import chart
from testcluster.kube_namespace import until

Object = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "deploy" / "flux"


def example(name: str) -> Object:
    """Return the last manifest of a file in deploy/flux."""
    *_, manifest = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
    return dict(manifest)


def helm_release(**values: Any) -> Object:
    """Return the example's HelmRelease with the images of the cluster and more values."""
    manifest = example("operator")
    manifest["spec"]["chart"]["spec"]["sourceRef"]["name"] = "charts"
    manifest["spec"]["values"] = {
        "image": {"tag": "dev"},
        "trainer": {"image": {"tag": "dev"}},
        **values,
    }
    return manifest


def release(flux: Flux, **values: Any) -> None:
    """Apply the example's HelmRelease with more values, and wait until it is Ready."""
    flux.kube.apply([helm_release(**values)])
    until(
        lambda: flux.ready("helmrelease", chart.RELEASE).get("status") == "True",
        120,
        flux.logs,
    )


def released(flux: Flux) -> tuple[str, str]:
    """Return the chart's version and the status of the newest Helm release of the HelmRelease."""
    newest = flux.objects.get("helmrelease", chart.RELEASE)["status"]["history"][0]
    return newest["chartVersion"], newest["status"]


def wait_released(flux: Flux, commit: str) -> None:
    """Wait until the chart of a commit is released."""
    version = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["version"]
    until(
        lambda: released(flux) == (f"{version}+{commit[:12]}", "deployed"),
        120,
        flux.logs,
    )
