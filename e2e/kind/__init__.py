"""Tests on nodes that are Docker containers, created by kind."""
