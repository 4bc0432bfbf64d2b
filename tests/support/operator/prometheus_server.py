"""A real Prometheus on this machine."""

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from support.operator.charts import Object
from support.programs import program
from support.stores.servers import LOOPBACK, free_port, running

from testcluster.kube_namespace import until


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    port: int

    def is_ready(self) -> bool:
        """Return whether it answers queries."""
        try:
            with urllib.request.urlopen(
                f"http://{LOOPBACK}:{self.port}/-/ready", timeout=30
            ):
                return True
        except OSError:
            return False

    def ask(self, path: str, **parameters: str) -> Object:
        """Return `data` of an answer of the HTTP API. Raises HTTPError for a query that cannot be computed."""
        url = f"http://{LOOPBACK}:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            data: Object = json.load(response)["data"]
        return data

    def query(self, expression: str) -> list[Object]:
        """Return the series of an instant query."""
        result: list[Object] = self.ask("query", query=expression)["result"]
        return result

    def firing(self, alert: str) -> list[Object]:
        """Return the labels of the alerts of a rule that fire."""
        alerts = self.ask("alerts")["alerts"]
        return [
            firing["labels"]
            for firing in alerts
            if firing["labels"]["alertname"] == alert and firing["state"] == "firing"
        ]

    def targets(self, pool: str) -> list[Object]:
        """Return the targets of a scrape configuration."""
        return [
            target
            for target in self.ask("targets", state="active")["activeTargets"]
            if target["scrapePool"] == pool
        ]


def static(job: str, port: int, **labels: str) -> Object:
    """Return the scrape configuration of a process on this machine."""
    return {
        "job_name": job,
        "static_configs": [
            {
                "targets": [f"{LOOPBACK}:{port}"],
                "labels": labels,
            }
        ],
    }


@contextmanager
def prometheus(
    folder: Path, rules: list[Object], *scrape_configs: Object
) -> Iterator[Prometheus]:
    """Run a server that scrapes every 5 s and waits 2 s, not minutes, until an alert fires."""
    hasty = [{**rule, "for": "2s"} for rule in rules]
    (folder / "rules.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "finetune", "rules": hasty}]})
    )
    seconds = {
        "scrape_interval": "5s",
        "scrape_timeout": "5s",
        "evaluation_interval": "1s",
    }
    config = {
        "global": seconds,
        "rule_files": ["rules.yaml"],
        "scrape_configs": list(scrape_configs),
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    options = [
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
        "--log.level=warn",
    ]
    with running([program("prometheus"), *options], port, {}):
        server = Prometheus(port)
        until(server.is_ready, 120)
        yield server
