"""The provider without Docker: each machine is a set of Linux namespaces. Read provider.py first."""
