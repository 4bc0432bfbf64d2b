"""A cluster without Docker: machines made of namespaces; provider.py is the page to read first."""
