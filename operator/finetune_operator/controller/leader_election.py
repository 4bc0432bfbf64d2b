"""Leader election with a Lease, as in client-go: one replica reconciles, the others stand by.

No lease can keep two leaders from overlapping for a moment. Deterministic names and resourceVersions then prevent that
anything is done twice. The Lease only prevents the duplicate work.
"""

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists

LEASE_DURATION = 15.0
"""Seconds without a renewal after which another replica may take over."""
RENEW_DEADLINE = 10.0
"""Seconds without a renewal after which the leader stops writing, by its own monotonic clock.

Less than `LEASE_DURATION`, so that the old leader stops before a new one may start.
"""
RETRY_PERIOD = 2.0
"""Seconds between two attempts to acquire or renew the Lease."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ObservedRecord:
    holder: str
    renew_time: str
    at: float
    """When this replica first observed the record, by its own clock: the clocks of other machines are not trusted."""


class LeaderElector:
    """Acquires, renews and releases the Lease."""

    def __init__(self, api: KubernetesClient, namespace: str, name: str, identity: str) -> None:
        self.api, self.namespace, self.name, self.identity = api, namespace, name, identity
        self._renewed: float | None = None
        self._observed: _ObservedRecord | None = None
        self._released = False
        self.last_response_at = 0.0
        """When the API server last responded to a request for the Lease, by the event loop's clock."""

    @property
    def is_leader(self) -> bool:
        """Whether the last renewal is recent enough that no other replica can have taken over."""
        return self._renewed is not None and _now() - self._renewed < RENEW_DEADLINE

    async def acquire(self) -> None:
        """Wait until this replica holds the Lease."""
        while not await self._try_acquire_or_renew():  # noqa: ASYNC110  the Lease is polled, as in client-go
            await asyncio.sleep(RETRY_PERIOD)
        log.info("became leader as %s", self.identity)

    async def renew(self) -> None:
        """Renew the Lease every `RETRY_PERIOD` seconds; return when it is lost."""
        while self.is_leader:
            await asyncio.sleep(RETRY_PERIOD)
            await self._try_acquire_or_renew()
        log.warning("no longer the leader: the Lease was not renewed for %g s", RENEW_DEADLINE)
        self._renewed = None

    async def release(self) -> None:
        """Stop writing, never lead again, and release the Lease, so that another replica can take over at once."""
        held, self._released, self._renewed = self.is_leader, True, None
        if not held:
            return
        try:
            lease = await self.api.get(paths.leases(self.namespace, self.name))
            if lease and lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"]["holderIdentity"] = ""
                await self.api.replace(paths.leases(self.namespace, self.name), lease)
        except ClusterError as error:
            log.warning("cannot release the Lease; another replica takes over in %g s: %s", LEASE_DURATION, error)

    async def _try_acquire_or_renew(self) -> bool:
        began = _now()
        try:
            # Half of the deadline: after a request without a response, another attempt can begin before the deadline.
            async with asyncio.timeout(RENEW_DEADLINE / 2):
                acquired = not self._released and await self._update_lease()
        except Conflict:
            acquired = False  # another replica was faster; the API server has responded
        except (ClusterError, TimeoutError) as error:
            message = str(error) or f"no response within {RENEW_DEADLINE / 2:g} s"
            log.warning("cannot acquire or renew the Lease %s/%s: %s", self.namespace, self.name, message)
            return False
        self.last_response_at = _now()
        if acquired and not self._released:  # `release` may have been called during the request
            self._renewed = began  # the start of the request: other replicas may have observed the renewal since then
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
        holder, renew_time = spec.get("holderIdentity") or "", str(spec.get("renewTime"))
        if self._observed is None or (self._observed.holder, self._observed.renew_time) != (holder, renew_time):
            self._observed = _ObservedRecord(holder, renew_time, _now())
        duration = float(spec.get("leaseDurationSeconds") or LEASE_DURATION)
        return holder in {"", self.identity} or _now() - self._observed.at > duration

    def _lease(self, previous: dict[str, Any]) -> dict[str, Any]:
        spec = previous.get("spec") or {}
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")  # noqa: TID251  an edge
        held = spec.get("holderIdentity") == self.identity
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": previous.get("metadata") or {"name": self.name, "namespace": self.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": int(LEASE_DURATION),
                "acquireTime": spec.get("acquireTime") if held else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (bool(previous) and not held),
            },
        }


def _now() -> float:
    return asyncio.get_running_loop().time()
