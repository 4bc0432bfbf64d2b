"""The address of the API server, with credentials and proxy."""

from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from yarl import URL

from finetune_operator.errors import ClusterError


async def load_configuration(context: str | None = None) -> Configuration:
    """Load the pod's own credentials, or a kubeconfig's. Raises ClusterError if there are none."""
    settings = await _load_credentials(context)
    # Unlimited: each watch holds a connection, and requests must not wait for a free connection.
    settings.connection_pool_maxsize = 0
    # aiohttp would read ~/.netrc and the proxies again for each request, in a thread: a third of the operator's CPU.
    settings.client_session_kwargs = {"trust_env": False}
    proxy = settings.proxy or environment_proxy(str(settings.host))
    if proxy:
        set_proxy(settings, proxy)
    return settings


def environment_proxy(url: str) -> str | None:
    """Return the proxy for a URL that HTTPS_PROXY, HTTP_PROXY and NO_PROXY set."""
    parts = urlsplit(url)
    if proxy_bypass(parts.hostname or ""):
        return None
    return getproxies().get(parts.scheme)


def set_proxy(settings: Configuration, proxy: str) -> None:
    """Use a proxy; its password goes into a header, because errors show the URL."""
    url = URL(proxy)
    settings.proxy = str(url.with_user(None))
    auth = aiohttp.BasicAuth.from_url(url)
    if auth:
        settings.proxy_headers = {"Proxy-Authorization": auth.encode()}


async def _load_credentials(context: str | None) -> Configuration:
    settings = Configuration()
    try:
        if context is None:
            try:
                load_in_cluster: Any = config.load_incluster_config
                load_in_cluster(client_configuration=settings)
            except config.ConfigException:
                # This process runs outside a cluster.
                pass
            else:
                return settings
        load_file: Any = config.load_kube_config
        await load_file(context=context, client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise ClusterError(
            f"no credentials for a cluster: {error}; set KUBECONFIG or pass --context"
        ) from error
    return settings
