"""The Lease, which a test moves from one replica to another."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from support.faults.life import Life, replica
from support.faults.proxy import running_proxy

STANDBY = "standby"
"""Identity of the second replica."""
OVERLAP_SECONDS = 3.0
"""More than the period in which a replica looks at the Lease."""


async def add_standby(stack: AsyncExitStack, life: Life, **options: Any) -> None:
    """Add a second replica to a life, which starts with the first and is killed at the end of the stack."""
    simulated = life.simulation
    proxy = await stack.enter_async_context(
        running_proxy(simulated.endpoint, simulated.session)
    )
    standby = replica(
        simulated,
        proxy,
        life.namespace,
        f"{life.namespace}-standby",
        identity=STANDBY,
        **options,
    )
    stack.callback(standby.kill)
    life.hooks_at_start.append(standby.start)


async def steal_lease(life: Life) -> None:
    """Take the Lease away from its holder. The replica that looks next takes it.

    If that is the other replica, both lead until the first replica looks, for up to two seconds.
    """
    path = f"/apis/coordination.k8s.io/v1/namespaces/{life.namespace}/leases/finetune-operator"
    assert await life.simulation.api.patch(path, {"spec": {"holderIdentity": ""}})
    await asyncio.sleep(OVERLAP_SECONDS)
