"""A cluster of Docker containers, made by kind.

Its configuration is read by kind's own program in the tests, and its commands by stand-ins for kind and docker; it has
not been run against a Docker engine yet.
"""
