"""A Kubernetes cluster: an attempt is a Job or a Deployment, a workspace is a PersistentVolumeClaim.

`client` sends requests to the API server and `cache` keeps the objects that the watches deliver. `resources` and
`translate` are pure: the first builds Kubernetes objects, the second reads them into the terms of core. `pods` sends
HTTP requests to pods. `cluster`, `servers` and `workspaces` combine them.
"""
