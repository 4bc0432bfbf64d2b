"""One replica works at a time: a Lease, as Kubernetes' own controllers use it.

Two may still overlap for a moment, whatever one does; that nothing is done twice then rests on deterministic names and
resourceVersions. The Lease only saves the work.
"""

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import AlreadyExists, KubernetesClient

LEASE_DURATION = 15.0
"""Seconds without a sign of life after which others may take over."""
RENEW_DEADLINE = 10.0
"""Seconds without a renewal after which a leader writes nothing more, by its own clock that never jumps."""
RETRY_PERIOD = 2.0
"""Seconds between two looks."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ObservedRecord:
    holder: str
    renewed: str
    at: float
    """When we saw this first, by our own clock: other machines' clocks are not trusted."""


class LeaderElector:
    """Take the Lease, keep it, give it back."""

    def __init__(self, api: KubernetesClient, namespace: str, name: str, identity: str) -> None:
        self.api, self.namespace, self.name, self.identity = api, namespace, name, identity
        self._renewed: float | None = None
        self._observed: _ObservedRecord | None = None
        self._released = False
        self.answered = 0.0
        """When the API server last answered a question about the Lease."""

    @property
    def is_leader(self) -> bool:
        """Whether nobody else can believe to be the leader yet."""
        return self._renewed is not None and _now() - self._renewed < RENEW_DEADLINE

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        while not await self._try_acquire_or_renew():  # noqa: ASYNC110  nobody tells us: the Lease has to be looked at
            await asyncio.sleep(RETRY_PERIOD)
        log.info("leading as %s", self.identity)

    async def renew(self) -> None:
        """Renew; return when it is lost."""
        while self.is_leader:
            await asyncio.sleep(RETRY_PERIOD)
            await self._try_acquire_or_renew()
        log.warning("not leading any more: the Lease was not renewed for %g s", RENEW_DEADLINE)
        self._renewed = None

    async def release(self) -> None:
        """Write nothing more and never lead again: others take over at once."""
        held, self._released, self._renewed = self.is_leader, True, None
        if not held:
            return
        try:
            lease = await self.api.get(paths.leases(self.namespace, self.name))
            if lease and lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"]["holderIdentity"] = ""
                await self.api.replace(paths.leases(self.namespace, self.name), lease)
        except ClusterError as error:
            log.warning("the Lease was not given back, so others wait %g s: %s", LEASE_DURATION, error)

    async def _try_acquire_or_renew(self) -> bool:
        began = _now()
        try:
            async with asyncio.timeout(RENEW_DEADLINE / 2):
                ours = not self._released and await self._update_lease()
        except Conflict:
            ours = False
        except (ClusterError, TimeoutError) as error:
            log.warning("the Lease %s/%s: %s", self.namespace, self.name, str(error) or "no answer")
            return False
        self.answered = _now()
        if ours and not self._released:
            self._renewed = began
        return self.is_leader

    async def _update_lease(self) -> bool:
        lease = await self.api.get(paths.leases(self.namespace, self.name))
        if lease is None:
            try:
                await self.api.create(paths.leases(self.namespace), self._lease({}))
            except AlreadyExists:
                return False
            return True
        if not self._is_free(lease["spec"]):
            return False
        await self.api.replace(paths.leases(self.namespace, self.name), {**lease, **self._lease(lease)})
        return True

    def _is_free(self, spec: dict[str, Any]) -> bool:
        holder, renewed = spec.get("holderIdentity") or "", str(spec.get("renewTime"))
        if self._observed is None or (self._observed.holder, self._observed.renewed) != (holder, renewed):
            self._observed = _ObservedRecord(holder, renewed, _now())
        patience = float(spec.get("leaseDurationSeconds") or LEASE_DURATION)
        return holder in {"", self.identity} or _now() - self._observed.at > patience

    def _lease(self, before: dict[str, Any]) -> dict[str, Any]:
        spec = before.get("spec") or {}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")  # noqa: TID251  an edge
        same = spec.get("holderIdentity") == self.identity
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": before.get("metadata") or {"name": self.name, "namespace": self.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": int(LEASE_DURATION),
                "acquireTime": spec.get("acquireTime") if same else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (bool(before) and not same),
            },
        }


def _now() -> float:
    return asyncio.get_running_loop().time()
