"""One release of the operator for each namespace: it holds a Lease beside its pipelines.

Two releases with other values would overwrite each other's work for ever. A release for all namespaces holds one Lease
in a namespace that every cluster has. A release for some namespaces holds a Lease in each of them, and gives way to a
release for all namespaces.
"""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus

from typing_extensions import override

from finetune_operator.controller import leader_election
from finetune_operator.controller.leader_election import LeaderElector
from finetune_operator.errors import ClusterError
from finetune_operator.kubernetes import paths
from finetune_operator.kubernetes.client import KubernetesClient
from finetune_operator.kubernetes.translate.api_errors import ApiError

LEASE = "finetune-pipelines"
"""Name of each Lease."""
EVERYWHERE = "kube-public"
"""Namespace of the Lease for all namespaces: the API server creates it, and its deletion is forbidden."""
# Else a release for hundreds of namespaces would send hundreds of requests a second.
PROMPT_NAMESPACES = 5
"""Namespaces whose Leases are renewed as often as the Lease of the replicas; more take longer in proportion."""
HAND_OVER_SECONDS = 10
"""Time after its end in which a replica of the same release may take over, and no other release."""
log = logging.getLogger(__name__)


class ScopeLease(LeaderElector):
    """The Lease of a release in a namespace. All replicas of the release are the same holder."""

    def __init__(
        self, api: KubernetesClient, namespace: str, release: str, stretch: float = 1.0
    ) -> None:
        super().__init__(api, namespace, LEASE, release)
        self.identity = release
        self.stretch = stretch
        self._is_forbidden = False

    @property
    def other(self) -> str:
        """The other release that holds the Lease; empty if none does, as far as the last request knows."""
        if self._observed is None or self._observed.holder == self.identity:
            return ""
        return self._observed.holder

    async def held_by_another(self) -> str:
        """Return the release that holds the Lease, and takes nothing; empty if it is free or cannot be read."""
        try:
            lease = await self.api.get(paths.leases(self.namespace, self.name))
        except ClusterError:
            # A release for some namespaces may read it only if a release for all namespaces lets it.
            return ""
        if lease is None or self._is_free(lease["spec"]):
            return ""
        return self.other

    @override
    async def _acquire_or_renew(self) -> bool:
        try:
            return await super()._acquire_or_renew()
        except ApiError as error:
            # A role of the platform team's own may not have this right, and a namespace may be on its way out or not
            # there yet. Neither may stop the pipelines of the other namespaces.
            if error.status not in {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}:
                raise
            if not self._is_forbidden:
                log.warning(
                    "cannot see whether another release reconciles the same pipelines: %s",
                    error,
                )
            self._is_forbidden = True
            return True

    @override
    async def _clear_holder(self) -> None:
        """Shorten the Lease. During an upgrade, the next replica of this release is faster than another release."""
        path = paths.leases(self.namespace, self.name)
        lease = await self.api.get(path)
        if lease and lease["spec"].get("holderIdentity") == self.identity:
            lease["spec"]["leaseDurationSeconds"] = HAND_OVER_SECONDS
            await self.api.replace(path, lease)


class Scope:
    """The namespaces of this release. No Lease: nothing is held, for an operator without the chart."""

    def __init__(self, leases: Sequence[ScopeLease], above: ScopeLease | None) -> None:
        self.leases = leases
        self.above = above
        """The Lease of a release for all namespaces, to which this release gives way; None: this is such a release."""
        self.other = ""
        """The other release that holds a part of this scope."""
        self._is_held = not leases

    @classmethod
    def create(
        cls,
        api: KubernetesClient,
        release: str,
        namespaces: Sequence[str],
    ) -> "Scope":
        """Create the scope of a release; no namespaces: all namespaces."""
        if not namespaces:
            return cls([ScopeLease(api, EVERYWHERE, release)], None)
        stretch = max(1.0, len(namespaces) / PROMPT_NAMESPACES)
        # The same order in every release, so that no two wait for each other.
        leases = [
            ScopeLease(api, namespace, release, stretch)
            for namespace in sorted(namespaces)
        ]
        return cls(leases, ScopeLease(api, EVERYWHERE, release))

    @property
    def is_held(self) -> bool:
        """Whether this release may write to the pipelines of its namespaces."""
        return self._is_held and all(lease.is_leader for lease in self.leases)

    @property
    def seconds_left(self) -> float:
        """Seconds until another release may write."""
        return min((lease.seconds_left for lease in self.leases), default=float("inf"))

    async def acquire(self) -> None:
        """Wait until this release holds all of its namespaces."""
        if not self.above:
            await self._name_releases_below()
        while not await self._try_acquire():  # noqa: ASYNC110  as the Lease of the replicas
            await asyncio.sleep(self._period)
        self._is_held = True

    async def renew(self) -> None:
        """Renew the Leases; return as soon as another release holds a part of the scope."""
        renewals = [asyncio.create_task(lease.renew()) for lease in self.leases]
        renewals.append(asyncio.create_task(self._wait_for_release_above()))
        try:
            await asyncio.wait(renewals, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_held = not self.leases
            for renewal in renewals:
                renewal.cancel()
            await asyncio.gather(*renewals, return_exceptions=True)

    async def release(self) -> None:
        """Release the Leases, so that another release can take over soon."""
        for lease in self.leases:
            await lease.release(_no_writes)

    @property
    def _period(self) -> float:
        return leader_election.RETRY_PERIOD * max(
            (lease.stretch for lease in self.leases), default=1.0
        )

    async def _try_acquire(self) -> bool:
        other = await self._other_release()
        if other and other != self.other:
            log.error(
                "another release of the operator, %s, reconciles the pipelines of these namespaces; this release "
                "starts nothing until it is gone: uninstall a release, or give both different `namespaces`",
                other,
            )
        self.other = other
        return not other and all(lease.is_leader for lease in self.leases)

    async def _other_release(self) -> str:
        """Try to acquire each Lease, and return the release that holds the first that is not free; empty: none."""
        if self.above:
            other = await self.above.held_by_another()
            if other:
                return other
        for lease in self.leases:
            if not await lease.try_acquire():
                return lease.other
        return ""

    async def _wait_for_release_above(self) -> None:
        while not self.above or not await self.above.held_by_another():  # noqa: ASYNC110
            await asyncio.sleep(self._period)

    async def _name_releases_below(self) -> None:
        """Log the releases for some namespaces, which give way to this release, before it writes anything."""
        for own in self.leases:
            query = {"fieldSelector": f"metadata.name={LEASE}"}
            try:
                async for lease in own.api.list(paths.leases(None), **query):
                    holder = lease["spec"].get("holderIdentity") or ""
                    namespace = lease["metadata"]["namespace"]
                    if namespace != EVERYWHERE and holder not in {"", own.identity}:
                        log.warning(
                            "namespace %s had the release %s, which gives way to this release for all namespaces",
                            namespace,
                            holder,
                        )
            except ClusterError as error:
                log.warning("cannot list the Leases of other releases: %s", error)


async def _no_writes() -> None:
    """Return at once: the writes have ended before."""
