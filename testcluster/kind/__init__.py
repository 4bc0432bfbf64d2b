"""The provider whose nodes are Docker containers, created by kind.

It has not been run against a Docker engine yet. In the tests, the kind program reads its configuration, and stubs of
kind, docker and kubectl run its commands.
"""
