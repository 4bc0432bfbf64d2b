"""Leader election with a Lease, as in client-go: one replica reconciles, the others stand by.

No lease can keep two leaders from overlapping for a moment. Deterministic names and resourceVersions then prevent that
anything is done twice. The Lease only prevents the duplicate work.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from finetune_operator.errors import ClusterError, Conflict
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import AlreadyExists

LEASE_DURATION = 15.0
"""Seconds without a renewal after which another replica may take over."""
# Less than LEASE_DURATION, so that the old leader stops before a new leader may start.
RENEW_DEADLINE = 10.0
"""Seconds without a renewal after which the leader stops writing, by its own monotonic clock."""
RETRY_PERIOD = 2.0
"""Seconds between two attempts to acquire or renew the Lease."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ObservedRecord:
    holder: str
    renew_time: str
    at: float
    """When this replica first observed the record, by its own clock: the clocks of other machines are not trusted."""

    def is_same(self, other: "_ObservedRecord") -> bool:
        """Return whether the record has not changed since the other observation."""
        return self.holder == other.holder and self.renew_time == other.renew_time


class LeaderElector:
    """Acquires, renews and releases the Lease.

    The holder's identity is the replica's name and a random suffix, as in client-go. Two processes with the same name,
    such as two on a host, must not both take the Lease for their own.
    """

    stretch = 1.0
    """Factor of all periods of the Lease."""

    def __init__(
        self, api: KubernetesClient, namespace: str, name: str, replica: str
    ) -> None:
        self.api = api
        self.namespace = namespace
        self.name = name
        self.identity = f"{replica}_{uuid.uuid4()}"
        self._renewed: float | None = None
        """Start of the last request that renewed the Lease, by the event loop's clock; None: not the leader."""
        self._observed: _ObservedRecord | None = None
        self._released = False
        self._release_ended = asyncio.Event()
        self.last_response_at = 0.0
        """When the API server last responded to a request for the Lease, by the event loop's clock."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica may start to write: its last renewal is more recent than the deadline."""
        return self._seconds_until(RENEW_DEADLINE * self.stretch) > 0

    @property
    def seconds_left(self) -> float:
        """Seconds until another replica may take over; 0 if it may now.

        A write must end before, so this is the longest timeout of a request that begins now. The leader starts none in
        the last `LEASE_DURATION - RENEW_DEADLINE` of them.
        """
        return self._seconds_until(LEASE_DURATION * self.stretch)

    def _seconds_until(self, limit: float) -> float:
        if self._renewed is None:
            return 0.0
        return max(0.0, self._renewed + limit - _now())

    async def acquire(self) -> None:
        """Wait until this replica holds the Lease."""
        while not await self.try_acquire():  # noqa: ASYNC110  the Lease is polled, as in client-go
            await asyncio.sleep(RETRY_PERIOD * self.stretch)
        log.info("became leader as %s", self.identity)

    async def renew(self) -> None:
        """Renew the Lease every `RETRY_PERIOD` seconds; return as soon as it is lost, or when its release has ended.

        The caller then cancels what it does as the leader. During a release, the writes under way must end instead.
        """
        while self.is_leader:
            period = RETRY_PERIOD * self.stretch
            await asyncio.sleep(
                min(period, self._seconds_until(RENEW_DEADLINE * self.stretch))
            )
            if self.is_leader:
                await self._try_acquire_or_renew(
                    self._seconds_until(RENEW_DEADLINE * self.stretch)
                )
        if self._released:
            await self._release_ended.wait()
        if self._renewed is not None:
            log.warning(
                "no longer the leader: the Lease was not renewed for %g s",
                RENEW_DEADLINE * self.stretch,
            )
            self._renewed = None

    async def release(self, wait_for_writes: Callable[[], Awaitable[None]]) -> None:
        """Stop writing, never lead again, and release the Lease, so that another replica can take over at once.

        Before the release, the writes under way end: they must not meet the writes of the next leader.
        """
        # Before the fields change: `is_leader` reads them.
        held = self.is_leader
        self._released = True
        self._renewed = None
        try:
            if held:
                await wait_for_writes()
                await self._release()
        finally:
            self._release_ended.set()

    async def _release(self) -> None:
        try:
            try:
                await self._clear_holder()
            except Conflict:
                # A renewal was under way.
                await self._clear_holder()
        except ClusterError as error:
            log.warning(
                "cannot release the Lease; another replica takes over in %g s: %s",
                LEASE_DURATION,
                error,
            )
        else:
            log.info("released the Lease")

    async def _clear_holder(self) -> None:
        lease = await self.api.get(paths.leases(self.namespace, self.name))
        if lease and lease["spec"].get("holderIdentity") == self.identity:
            lease["spec"]["holderIdentity"] = ""
            await self.api.replace(paths.leases(self.namespace, self.name), lease)

    async def try_acquire(self) -> bool:
        """Return whether this replica is the leader after one attempt."""
        return await self._try_acquire_or_renew()

    async def _try_acquire_or_renew(self, seconds: float = RENEW_DEADLINE) -> bool:
        """Return whether this replica is the leader, after one attempt that takes at most half of the deadline.

        A request without a response then leaves time for another attempt before the deadline.
        """
        began = _now()
        limit = min(seconds, RENEW_DEADLINE / 2)
        try:
            async with asyncio.timeout(limit):
                acquired = not self._released and await self._acquire_or_renew()
        except Conflict:
            # Other writers were faster twice; the next attempt finds out who leads.
            self.last_response_at = _now()
            return self.is_leader
        except (ClusterError, TimeoutError) as error:
            message = str(error) or f"no response within {limit:.1f} s"
            log.warning(
                "cannot acquire or renew the Lease %s/%s: %s",
                self.namespace,
                self.name,
                message,
            )
            return self.is_leader
        self.last_response_at = _now()
        if not acquired:
            self._on_held_by_another()
        # `release` may have been called during the request.
        elif not self._released:
            # The start of the request: other replicas may have observed the renewal since then.
            self._renewed = began
        return self.is_leader

    def _on_held_by_another(self) -> None:
        """Stop being the leader at once, whatever is left of the time since the last renewal."""
        if self._renewed is not None:
            holder = self._observed.holder if self._observed else "another replica"
            log.warning("no longer the leader: the Lease is held by %s", holder)
            self._renewed = None

    async def _acquire_or_renew(self) -> bool:
        try:
            return await self._update_lease()
        except Conflict:
            # The Lease has changed since it was read: another replica may have taken it over.
            return await self._update_lease()

    async def _update_lease(self) -> bool:
        lease = await self.api.get(paths.leases(self.namespace, self.name))
        if lease is None:
            try:
                await self.api.create(paths.leases(self.namespace), self._lease({}))
            except AlreadyExists as error:
                # A Conflict is tried again at once, like any Lease that has changed since it was read.
                raise Conflict("another replica created the Lease") from error
            return True
        if not self._is_free(lease["spec"]):
            return False
        await self.api.replace(
            paths.leases(self.namespace, self.name), {**lease, **self._lease(lease)}
        )
        return True

    def _is_free(self, spec: dict[str, Any]) -> bool:
        record = _ObservedRecord(
            holder=spec.get("holderIdentity") or "",
            renew_time=str(spec.get("renewTime")),
            at=_now(),
        )
        # Any change shows that the holder lives, and restarts the wait for its end.
        if self._observed is None or not self._observed.is_same(record):
            self._observed = record
        if record.holder in {"", self.identity}:
            return True
        duration = float(spec.get("leaseDurationSeconds") or LEASE_DURATION)
        return record.at - self._observed.at > duration

    def _lease(self, previous: dict[str, Any]) -> dict[str, Any]:
        spec = previous.get("spec") or {}
        time = datetime.now(UTC)  # noqa: TID251  an edge
        now = time.isoformat(timespec="microseconds").replace("+00:00", "Z")
        held = spec.get("holderIdentity") == self.identity
        metadata = previous.get("metadata") or {
            "name": self.name,
            "namespace": self.namespace,
        }
        is_transition = bool(previous) and not held
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": int(LEASE_DURATION * self.stretch),
                "acquireTime": spec.get("acquireTime") if held else now,
                "renewTime": now,
                "leaseTransitions": int(spec.get("leaseTransitions") or 0)
                + is_transition,
            },
        }


def _now() -> float:
    return asyncio.get_running_loop().time()
