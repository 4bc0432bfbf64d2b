"""End-to-end tests on a real Kubernetes cluster, with the built images."""
