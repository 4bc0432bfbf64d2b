"""What is proven on a real Kubernetes: the cluster, the images, and the tests that use both."""
